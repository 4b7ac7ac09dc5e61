"""Checkpoint folders: what is written, what is refused, in which order they go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from frugal.checkpoints.complete import MARKER, find_latest, why_incomplete
from frugal.checkpoints.read import load_checkpoint
from frugal.checkpoints.resume import differences, starting_point
from frugal.checkpoints.rotation import check_space, checkpoint_bytes, list_checkpoints, rotate
from frugal.checkpoints.write import CheckpointParts, recover, save_checkpoint
from frugal.errors import CheckpointError
from frugal.tensor_files import read_tensors, write_tensors
from frugal.training.optim import OptimizerState


def parts(step: int, size: int = 8) -> CheckpointParts:
    def write_adapter(folder: Path) -> None:
        save_file({"a": torch.full((size,), float(step))}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

    state = OptimizerState({"a|exp_avg": torch.full((size,), step, dtype=torch.uint8)}, {"optimizer": "AdamW"})
    return CheckpointParts(write_adapter, state, {"0.cpu": torch.get_rng_state()}, {"config": {}})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 7, parts(7))
    assert folder.name == "checkpoint-7"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]  # nothing beside it
    loaded = load_checkpoint(folder)
    assert (loaded.step, loaded.optimizer.meta) == (7, {"optimizer": "AdamW"})
    assert loaded.optimizer.tensors["a|exp_avg"].dtype == torch.uint8
    assert torch.equal(loaded.rng["0.cpu"], torch.get_rng_state())


def test_newest_by_number_not_by_text(tmp_path: Path) -> None:
    for step in (9, 10, 100, 20):
        save_checkpoint(tmp_path, step, parts(step))
    latest = find_latest(tmp_path)
    assert latest is not None
    assert latest.name == "checkpoint-100"
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 10, 20, 100]


@pytest.mark.parametrize("name", ["optimizer.safetensors", MARKER, "adapter_model.safetensors", "rng.safetensors"])
def test_incomplete_ones_are_skipped_by_name(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path, 9, parts(9))
    newest = save_checkpoint(tmp_path, 10, parts(10))
    (newest / name).unlink()
    said: list[str] = []
    latest = find_latest(tmp_path, said.append)
    assert latest is not None
    assert latest.name == "checkpoint-9"
    assert len(said) == 1
    assert "checkpoint-10" in said[0]
    assert name in said[0]
    with pytest.raises(CheckpointError, match="checkpoint-10"):
        load_checkpoint(newest)
    # the rest is replaced at the same step
    assert why_incomplete(save_checkpoint(tmp_path, 10, parts(10))) is None


def test_changed_and_shortened_files_are_found(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, parts(1))
    path = folder / "optimizer.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "SHA-256" in (why_incomplete(folder) or "")
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_checkpoint(folder)
    path.write_bytes(content[:-1])
    assert "bytes instead of" in (why_incomplete(folder) or "")


def test_a_marker_cannot_point_outside(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, parts(1))
    marker = json.loads((folder / MARKER).read_text())
    marker["files"]["../x"] = {"bytes": 0, "sha256": ""}
    (folder / MARKER).write_text(json.dumps(marker))
    (tmp_path / "x").touch()
    assert why_incomplete(folder) == f"{MARKER} names the file '../x': it must be a name inside {folder}."


def test_replacing_that_was_cut_off_is_undone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, parts(5)).rename(tmp_path / ".checkpoint-5.00aa11bb22cc.old")
    (tmp_path / ".checkpoint-6.00aa11bb22cc.tmp").mkdir()
    recover(tmp_path, lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert load_checkpoint(tmp_path / "checkpoint-5").step == 5


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (2, None, [10, 11]),
        (2, 9, [9, 11]),
        (1, 9, [9, 11]),
        (None, None, [8, 9, 10, 11]),
        (1, 11, [11]),
        (3, 8, [8, 10, 11]),
    ],
)
def test_rotation(tmp_path: Path, limit: int | None, best: int | None, kept: list[int]) -> None:
    for step in (8, 9, 10, 11):
        save_checkpoint(tmp_path, step, parts(step))
    rotate(tmp_path, limit=limit, best_step=best, ours=lambda folder: True)
    assert [step for step, _ in list_checkpoints(tmp_path)] == kept


def test_tensors_keep_dtype_and_bytes_and_shared_ones_are_stored_twice(tmp_path: Path) -> None:
    table = torch.linspace(-1, 1, 256)
    tensors = {
        "a": table,
        "b": table,
        "bf16": torch.randn(3, 4).bfloat16().t(),
        "byte": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(3.0),
    }
    write_tensors(tmp_path / "t.safetensors", tensors, {"n": 1})
    back, meta = read_tensors(tmp_path / "t.safetensors")
    assert meta == {"n": 1}
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_an_empty_tensor_is_never_saved(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="lora_A"):
        write_tensors(tmp_path / "t.safetensors", {"lora_A": torch.empty(0)})


def test_space_is_checked_with_one_more_than_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frugal.checkpoints.rotation.free_bytes", lambda folder: 3_000_000)
    check_space(tmp_path, one_bytes=1_000_000, kept=2)
    with pytest.raises(CheckpointError, match=r"4.0 MB \(4,000,000 bytes\), 3.0 MB \(3,000,000 bytes\) are free"):
        check_space(tmp_path, one_bytes=1_000_000, kept=3)


def test_forecast_of_a_checkpoint(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000, 1000))
    assert checkpoint_bytes({"a": parameter}, "adamw") == 4_000_000 + 8_000_000 + 1_000_000


def test_a_resumed_run_says_from_where(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, parts(2))
    said: list[str] = []
    assert starting_point(tmp_path, {}, True, said.append) == tmp_path / "checkpoint-2"
    assert starting_point(tmp_path, {}, "checkpoint-2", said.append) == tmp_path / "checkpoint-2"
    assert said == [f"going on from {tmp_path / 'checkpoint-2'}"] * 2


def test_a_key_that_the_saving_version_did_not_have_counts_as_its_default() -> None:
    saved = {"train": {"learning_rate": 1e-4}}
    assert differences(saved, {"train": {"learning_rate": 1e-4, "label_smoothing": 0.0}}) == []
    assert differences(saved, {"train": {"learning_rate": 1e-4, "label_smoothing": 0.1}}) == [
        "train.label_smoothing: 0.0 -> 0.1"
    ]
    assert differences(saved, {"train": {"learning_rate": 1e-4, "unknown": 1}}) == ["train.unknown: (not set) -> 1"]
