"""Preference training from a configuration: the margin grows, the log and the forecast know pairs, resume is exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import frugal
from frugal.errors import ConfigError
from frugal.objectives.pairs import METRICS
from frugal.run.train import train
from frugal.training.log import read_log
from tests.support import runs
from tests.support.rows import write_rows


def pairs(path: Path, count: int = 16) -> Path:
    """Rows of which the chosen answers have other words than the rejected ones."""
    rows = []
    for n in range(count):
        bad = "the answer is " + "no " * (n % 4 + 1)
        rows.append({"prompt": f"hello {n}", "chosen": "good morning " * (1 + n % 3), "rejected": bad})
    return write_rows(path, rows)


def config(base: Path, rows: Path, run_dir: Path, name: str = "dpo", **sections: Any) -> dict[str, Any]:
    """10 steps of 2 pairs."""
    train = {"max_steps": 10, "eval_steps": 10}
    made = runs.config(base, rows, run_dir, data={"eval_split": 4}, train=train, **sections)
    return {**made, "objective": {"name": name}}


def test_a_dpo_run_learns_and_goes_on_bit_for_bit(
    tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, whole, part = pairs(tmp_path / "pairs.jsonl"), tmp_path / "whole", tmp_path / "part"
    output = {"output": {"dir": str(whole), "save_steps": 5, "save_total_limit": None}}
    result = train(config(tiny_llama_folder, rows, whole, **output))
    log = read_log(whole / "train_log.jsonl")
    steps = [record for record in log if "loss" in record]
    assert all(set(METRICS) <= set(record) for record in steps)
    assert all(f"eval_{name}" in log[0] for name in METRICS)
    assert log[0]["eval_loss"] == pytest.approx(0.6931, abs=1e-3), "the adapter begins as nothing"
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"] + 0.5
    assert log[-1]["eval_rewards/accuracies"] > 0.5
    assert result.eval_loss is not None
    assert result.eval_loss < 0.5
    assert steps[0]["trained_tokens"] > 4, "tokens, not pairs"
    shown = capsys.readouterr().out
    assert "margin" in shown
    assert "forecast" in shown
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["config"]["objective"]["name"] == "dpo"
    foreseen = manifest["forecast"]["device"]["phases"]["steady_step"]["bytes"]
    measured = manifest["warm-up step"]["step_bytes"]
    assert foreseen == pytest.approx(measured, rel=0.1)

    part.mkdir()
    shutil.copytree(whole / "checkpoint-5", part / "checkpoint-5")
    shutil.copy(whole / "train_log.jsonl", part / "train_log.jsonl")
    train(config(tiny_llama_folder, rows, part), resume=True)
    runs.same_result(whole, part)
    margins = [[record.get("rewards/margins") for record in read_log(run / "train_log.jsonl")] for run in (whole, part)]
    assert margins[0] == margins[1]

    measured_again = frugal.evaluate(whole)
    assert measured_again["loss"] == pytest.approx(result.eval_loss, rel=1e-5)
    assert measured_again["rewards/margins"] == pytest.approx(log[-1]["eval_rewards/margins"], rel=1e-4)
    assert "tokens" not in measured_again
    assert measured_again["rows"] == 4


def test_a_kto_run_learns(tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": f"hello {n}", "completion": "good morning" if n % 2 else "the answer is no", "label": bool(n % 2)}
        for n in range(12)
    ]
    path, run = write_rows(tmp_path / "judged.jsonl", rows), tmp_path / "run"
    train({**config(tiny_llama_folder, path, run), "objective": {"name": "kto", "precompute_reference": True}})
    log = read_log(run / "train_log.jsonl")
    steps = [record for record in log if "loss" in record]
    assert all("kl" in record for record in steps)
    assert log[0]["eval_loss"] == pytest.approx(0.5, abs=1e-3), "the adapter begins as nothing"
    assert log[-1]["eval_rewards/margins"] > 0.2
    assert steps[-1]["loss"] < 0.45
    assert "margin" in capsys.readouterr().out
    manifest = json.loads((run / "manifest.json").read_text())
    foreseen = manifest["forecast"]["device"]["phases"]["steady_step"]["bytes"]
    assert foreseen == pytest.approx(manifest["warm-up step"]["step_bytes"], rel=0.1)
    assert frugal.evaluate(run)["kl"] == pytest.approx(log[-1]["eval_kl"], rel=1e-4, abs=1e-6)


def test_rows_of_the_other_kind_leave_no_folder(tiny_llama_folder: Path, tmp_path: Path) -> None:
    rows = pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(ConfigError, match="objective:\n  name: dpo"):
        train(config(tiny_llama_folder, rows, tmp_path / "run", "sft"))
    single = runs.write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="is no preference row"):
        train(config(tiny_llama_folder, single, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": {"name": "sft", "beta": 0.2}}, "objective.beta: has no effect with objective.name: sft"),
        ({"objective": {"name": "orpo", "loss_type": "ipo"}}, "objective.loss_type: has no effect"),
        ({"objective": {"name": "dpo", "loss_type": "hinge", "label_smoothing": 0.1}}, "write loss_type: sigmoid"),
        ({"objective": {"name": "dpo"}, "train": {"label_smoothing": 0.1}}, "write objective.label_smoothing"),
        (
            {"objective": {"name": "simpo"}, "data": {"packing": True}},
            "data.packing: is not there for",
        ),
        ({"objective": {"name": "dpo"}, "data": {"train_on": "all"}}, "compares answers"),
        ({"objective": {"name": "dpo", "desirable_weight": 2}}, "it is a key of kto"),
        ({"objective": {"name": "orpo", "precompute_reference": True}}, "it is a key of dpo, kto"),
        (
            {"objective": {"name": "kto"}, "lora": {"init_lora_weights": "pissa"}, "model": {"quantize": "none"}},
            "pissa changes the base",
        ),
    ],
)
def test_settings_that_exclude_each_other(changes: dict[str, dict[str, Any]], said: str) -> None:
    whole: dict[str, dict[str, Any]] = {"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}}
    for name, section in changes.items():
        whole[name] = {**whole.get(name, {}), **section}
    with pytest.raises(ConfigError, match=said):
        frugal.load_config(whole)
