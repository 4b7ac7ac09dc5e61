"""`frugal verify`: right models pass every check, and each planted fault makes its check red."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from frugal.cli.main import app
from frugal.config import dump_yaml, load_config
from frugal.exports import merge_math
from frugal.objectives.causal_lm import CausalLM
from frugal.run import verify as command
from frugal.run.verify import verify
from frugal.verification import CHECKS, model_checks
from tests.conftest import CHATML
from tests.support import runs
from tests.support.merged import make_run

OF_ROWS = ["fused_is_stock", "packed_is_unpacked", "neighbours", "split_window"]


@pytest.fixture(scope="module")
def config(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verify")
    return runs.config(tiny_llama_folder, runs.write_rows(folder / "rows.jsonl", 8), folder / "run")


@pytest.fixture(scope="module")
def run(config: dict[str, Any], tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified") / "run"
    make_run(folder, tiny_llama_folder)
    nf4 = {**config, "model": {**config["model"], "quantize": "nf4"}, "output": {"dir": str(folder)}}
    (folder / "config.yaml").write_text(dump_yaml(load_config(nf4)), encoding="utf-8")
    return folder


def wrong(what: Any, *names: str, **options: Any) -> dict[str, str]:
    """Check -> message and advice of those that are red."""
    found = verify(what, names=list(names) or None, **options)
    assert len(found.checks) >= len(names)
    return {check.op: f"{check.message} {check.advice}" for check in found.checks if not check.passed}


def test_a_right_run_passes_all_checks_of_a_model(run: Path) -> None:
    found = verify(run)
    assert wrong(run, "answers_end") == {}
    assert [check for check in found.checks if not check.passed] == []
    assert found.not_run == []
    assert len({check.op for check in found.checks}) == sum(bool(row.needs) for row in CHECKS.values()) == 9
    assert all(check.advice for check in found.checks)


def test_a_configuration_is_checked_without_a_run(config: dict[str, Any]) -> None:
    found = verify(config)
    assert found.passed
    assert {check.op for check in found.checks} >= {"fused = stock", "rows together = alone", "end token trained"}
    assert [line.split()[0] for line in found.not_run] == ["base_fingerprint", "adapter_is_peft", "merged_is_adapter"]


def test_the_folder_of_another_tool_is_checked_as_far_as_it_goes(tiny_llama_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_llama_folder, quantize="none")
    for name in ("config.yaml", "manifest.json"):
        (tmp_path / "run" / name).unlink()
    found = verify(tmp_path / "run", base=tiny_llama_folder)
    assert found.passed
    assert {check.op for check in found.checks} == {"base fingerprint", "adapter = stock PEFT's", "merged = adapter"}
    assert all("rows" in line for line in found.not_run)


def test_rows_that_are_elsewhere_by_now_are_named(tiny_llama_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_llama_folder, quantize="none")  # its configuration names x.jsonl
    found = verify(tmp_path / "run", base=tiny_llama_folder, names=["fused_is_stock"])
    assert found.checks == []
    (line,) = found.not_run
    assert "fused_is_stock needs rows of the configuration" in line
    assert "x.jsonl" in line


def test_an_adapter_whose_b_is_zero_is_right(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """B of layers that no row reached is 0: it is compared as stored, not after it was given random values."""
    make_run(tmp_path / "run", tiny_llama_folder, quantize="none")
    for name in ("config.yaml", "manifest.json"):
        (tmp_path / "run" / name).unlink()
    file = tmp_path / "run" / "adapter_model.safetensors"
    stored = {key: value * (".lora_B." not in key) for key, value in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    assert wrong(tmp_path / "run", "adapter_is_peft", base=tiny_llama_folder) == {}


def test_a_shifted_mask_is_found(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    collate = CausalLM.collate

    def shifted(self: CausalLM, data: Any, rows: Any) -> Any:
        batch = collate(self, data, rows)
        return {**batch, "labels": batch["labels"].roll(1, -1)}

    monkeypatch.setattr(CausalLM, "collate", shifted)
    assert "memory.fused: false" in wrong(config, *OF_ROWS)["fused = stock"]


def test_rows_that_reach_into_each_other_are_found(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    collate = CausalLM.collate

    def leaking(self: CausalLM, data: Any, rows: Any) -> Any:
        batch = collate(self, data, rows)
        tokens = batch["input_ids"].shape[1]
        ends = {key: [0, tokens] for key in ("cu_seq_lens_q", "cu_seq_lens_k") if key in batch}
        return {
            **batch,
            **ends,
            "position_ids": torch.arange(tokens)[None],
            "max_length_q": tokens,
            "max_length_k": tokens,
        }

    monkeypatch.setattr(CausalLM, "collate", leaking)
    found = wrong(config, *OF_ROWS)
    assert {"rows together = alone", "a row ignores its neighbours"} <= set(found)
    assert "data.packing: false" in found["a row ignores its neighbours"]


def test_a_micro_batch_that_divides_by_its_own_targets_is_found(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = CausalLM.loss

    def mean(self: CausalLM, *args: Any, **options: Any) -> Any:
        total, sums = loss(self, *args, **options)
        return total / sums[1], sums

    monkeypatch.setattr(CausalLM, "loss", mean)
    assert "split of a window" in wrong(config, *OF_ROWS)


def test_an_adapter_that_is_loaded_otherwise_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frugal.models.build import build

    def transposed(spec: Any) -> Any:
        built = build(spec)
        with torch.no_grad():
            for name, parameter in built.model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(parameter.flip(0))
        return built

    monkeypatch.setattr(model_checks, "build", transposed)
    assert list(wrong(run, "adapter_is_peft", "merged_is_adapter")) == ["adapter = stock PEFT's"]


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_a_merge_that_changes_nothing_or_loses_alpha_is_found(
    scale: float, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_math._Applied, "_delta", lambda self, rows: scale * (self.b[rows] @ self.a))
    assert list(wrong(run, "adapter_is_peft", "merged_is_adapter")) == ["merged = adapter"]


def test_another_base_is_found(run: Path, make_tiny_llama: Any) -> None:
    found = wrong(run, "base_fingerprint", base=make_tiny_llama(seed=5))
    assert "has other weights" in found["base fingerprint"]
    assert "--base" in found["base fingerprint"]


def test_answers_without_a_trained_end_are_found(config: dict[str, Any], make_tiny_llama: Any) -> None:
    endless = CHATML.replace("+ '<|im_end|>\n' }}", "+ ('' if message['role'] == 'assistant' else '<|im_end|>\n') }}")
    assert endless != CHATML
    base = make_tiny_llama(template=endless)
    found = wrong({**config, "model": {**config["model"], "base": str(base)}}, "answers_end")
    assert "learn to stop" in found["end token trained"]


def test_a_question_that_chat_asks_otherwise_is_found(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "asked_otherwise", lambda *args, **options: ["asked ...'a', trained ...'b'"])
    assert "asked ...'a'" in wrong(config, "asked_as_trained")["chat asks as trained"]


def test_the_command_prints_a_table_or_json_and_leaves_with_1(run: Path, tmp_path: Path) -> None:
    names = CliRunner().invoke(app, ["verify", str(tmp_path / "nowhere")])
    assert (names.exit_code, "does not exist" in names.output) == (2, True)
    done = CliRunner().invoke(app, ["verify", str(run), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output[done.output.index("{\n") :])
    assert found["passed"]
    assert all(check["measured"] <= check["tolerance"] for check in found["checks"])
    broken = load_file(run / "adapter_model.safetensors")
    copy = tmp_path / "run"
    copy.mkdir()
    for file in run.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    save_file({name: t * float("nan") for name, t in broken.items()}, copy / "adapter_model.safetensors")
    done = CliRunner().invoke(app, ["verify", str(copy)])
    assert done.exit_code == 1
    assert "WRONG" in done.output
    assert "Do not use this adapter" in done.output.replace("\n", " ")
