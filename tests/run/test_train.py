"""Whole runs: the best checkpoint, a full disk, half precision, evaluation afterwards, wrong trackers."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import frugal.checkpoints.write
from frugal.checkpoints.complete import why_incomplete
from frugal.errors import CheckpointError, ConfigError, FrugalError
from frugal.files import read_json
from frugal.run.evaluate import evaluate
from frugal.run.train import train
from frugal.training.log import read_log
from tests.support import runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 14)


def settings(base: Path, data: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    plain = runs.config(base, data, run_dir, **sections)
    plain["data"]["eval_split"] = 4
    return plain


def test_the_best_checkpoint_is_kept_and_its_adapter_ends_the_run(
    tiny_llama_folder: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(tiny_llama_folder, data, tmp_path / "run")
    # rates that soon leave a model that answers the same to everything: later evaluations are alike, none is the best
    config["train"].update(
        max_steps=9,
        eval_steps=1,
        learning_rate=500.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        max_grad_norm=0,
    )
    config["output"].update(save_steps=4, save_total_limit=1, keep_best=True)
    result = train(config)
    losses = {r["step"]: r["eval_loss"] for r in read_log(tmp_path / "run" / "train_log.jsonl") if r["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 9
    assert (result.best_step, result.eval_loss) == (best, losses[best])
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-9"}
    final, kept = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "run", tmp_path / "run" / f"checkpoint-{best}")
    )
    assert all(torch.equal(final[name], kept[name]) for name in kept)
    # what `frugal eval` measures afterwards, in NF4-free fp32, is what the run measured
    assert evaluate(tmp_path / "run")["loss"] == pytest.approx(losses[best], rel=1e-5)
    whole = evaluate(tmp_path / "run", data=data)
    assert whole["rows"] == 14
    assert whole["perplexity"] == pytest.approx(torch.tensor(whole["loss"]).double().exp().item(), rel=1e-6)


def test_disk_full_in_the_middle_of_a_run(
    tiny_llama_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = frugal.checkpoints.write.write_tensors

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-4" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, *args, **kwargs)

    monkeypatch.setattr(frugal.checkpoints.write, "write_tensors", full)
    run_dir = tmp_path / "run"
    config = settings(tiny_llama_folder, data, run_dir)
    config["output"]["save_steps"] = 2
    with pytest.raises(CheckpointError) as caught:
        train(config)
    message = str(caught.value)
    assert f"cannot write {run_dir / 'checkpoint-4'}" in message
    assert re.search(r"[\d,]+ bytes are free there\): No space left on device", message)
    assert [path.name for path in run_dir.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert why_incomplete(run_dir / "checkpoint-2") is None
    assert not (run_dir / "run.lock").exists()
    assert read_json(run_dir / "manifest.json")["status"] == "failed"
    rescued = re.search(r"The adapter of step 4 .* was saved in (\S+)\.", message)
    assert rescued is not None
    assert load_file(Path(rescued.group(1)) / "adapter_model.safetensors")
    # with room again the run goes on, and ends as one that never stopped
    monkeypatch.setattr(frugal.checkpoints.write, "write_tensors", original)
    train(config, resume=True)
    train({**config, "output": {"dir": str(tmp_path / "whole")}})
    runs.same_result(run_dir, tmp_path / "whole")


def test_too_small_a_disk_stops_before_training(
    tiny_llama_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frugal.checkpoints.rotation.free_bytes", lambda folder: 2_000_000)
    with pytest.raises(CheckpointError, match=r"2 checkpoints of 1\.1 MB and one being written need 3\.3 MB"):
        train(settings(tiny_llama_folder, data, tmp_path / "run"))
    assert not (tmp_path / "run" / "train_log.jsonl").exists()


def test_half_precision_with_loss_scaling(tiny_llama_folder: Path, data: Path, tmp_path: Path) -> None:
    """float16 as on a GPU without bfloat16: adapters and their state stay fp32, and scaling resumes where it was."""
    config = settings(tiny_llama_folder, data, tmp_path / "run")
    config["model"]["dtype"] = "float16"
    config["train"]["max_steps"] = 6
    config["output"]["save_steps"] = 3
    train(config)
    log = read_log(tmp_path / "run" / "train_log.jsonl")
    assert log[-1]["loss"] < log[1]["loss"] - 0.5
    state = read_json(tmp_path / "run" / "checkpoint-6" / "trainer_state.json")["loop"]
    assert state["loss_scaling"]["scale"] > 0
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        tensors = load_file(tmp_path / "run" / "checkpoint-6" / file)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    train(config, resume="checkpoint-3")
    assert runs.records(tmp_path / "run") == [{k: r[k] for k in runs.EXACT if k in r} for r in log]


def test_losses_that_stop_being_finite_stop_the_run(tiny_llama_folder: Path, data: Path, tmp_path: Path) -> None:
    config = settings(tiny_llama_folder, data, tmp_path / "run")
    config["train"].update(learning_rate=2.0e30, lr_scheduler_type="constant", max_grad_norm=0)
    with pytest.raises(FrugalError, match=r"the loss is nan .* Lower train\.learning_rate"):
        train(config)


def test_a_tracker_that_is_not_installed_stops_at_once(
    tiny_llama_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frugal.run.trackers.find_spec", lambda name: None)
    config = settings(tiny_llama_folder, data, tmp_path / "run")
    config["train"]["report_to"] = ["wandb"]
    with pytest.raises(ConfigError, match=r"wandb, which is not installed here.*pip install wandb"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_targets_that_match_nothing_are_refused_before_anything_is_written(
    tiny_llama_folder: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(tiny_llama_folder, data, tmp_path / "runs" / "a", lora={"target_modules": ["query_key_value"]})
    with pytest.raises(ConfigError, match=r"'query_key_value' matches no layer") as caught:
        train(config)
    assert "q_proj" in str(caught.value)
    assert "input_layernorm" not in str(caught.value)  # only what can be adapted is offered
    assert not (tmp_path / "runs").exists()
