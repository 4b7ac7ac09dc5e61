"""X02: pickles in side files. Nothing is ever unpickled, the refusal names the file, our own files hold no pickle."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from frugal.checkpoints.complete import MARKER
from frugal.checkpoints.read import load_checkpoint
from frugal.checkpoints.write import CheckpointParts, save_checkpoint
from frugal.errors import CheckpointError
from frugal.files import sha256_file
from frugal.tensor_files import is_pickle, read_tensors
from frugal.training.optim import OptimizerState


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (str(self.marker),))


def checkpoint(run_dir: Path) -> Path:
    def write_adapter(folder: Path) -> None:
        save_file({"a": torch.zeros(10)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

    state = OptimizerState({"a|exp_avg": torch.zeros(10)}, {"optimizer": "AdamW"})
    return save_checkpoint(
        run_dir, 3, CheckpointParts(write_adapter, state, {"0.cpu": torch.get_rng_state()}, {"config": {}})
    )


def pickles(marker: Path) -> dict[str, bytes]:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb(marker)))
    return {"raw": pickle.dumps(Bomb(marker)), "torch archive": archive.getvalue()}


@pytest.mark.parametrize("kind", ["raw", "torch archive"])
@pytest.mark.parametrize(
    "name",
    [
        "optimizer.safetensors",
        "rng.safetensors",
        "trainer_state.json",
        "adapter_model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "adapter_model.bin",
        "notes",
    ],
)
def test_a_pickle_is_refused_by_name_and_never_run(tmp_path: Path, name: str, kind: str) -> None:
    folder = checkpoint(tmp_path)
    path = folder / name
    path.write_bytes(pickles(tmp_path / "marker")[kind])
    # the one who sends such a checkpoint also fits its list of files
    listed = json.loads((folder / MARKER).read_text())
    listed["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (folder / MARKER).write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + " is a pickle"):
        load_checkpoint(folder)
    assert not (tmp_path / "marker").exists()


def test_an_old_bin_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    torch.save({"a": torch.zeros(1)}, folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="Convert the file"):
        load_checkpoint(folder)


@pytest.mark.parametrize("claim", [2**63 - 1, 2**40, 0, 1, 200])
def test_a_header_that_claims_too_much(tmp_path: Path, claim: int) -> None:
    path = tmp_path / "optimizer.safetensors"
    path.write_bytes(claim.to_bytes(8, "little") + b"{}" + b" " * 50)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        read_tensors(path)


def test_our_own_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert not [path for path in files if is_pickle(path)]
    # a header of 0x0280 bytes starts as a pickle of protocol 2 does: not taken for one
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode().ljust(0x280)
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x01")
    assert read_tensors(tmp_path / "x.safetensors")[0]["a"].tolist() == [1]
