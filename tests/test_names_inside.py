"""Names from files stay inside their folder (U16): checked before anything is opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.errors import ModelError
from frugal.files import inside
from frugal.models.resolve import stored_tensors
from frugal.tensor_files import read_headers, write_tensors

OUTSIDE = [
    "../elsewhere/x.safetensors", "a/../../x", "/etc/passwd", "C:\\weights\\x", "..\\x", "\\\\host\\share\\x", "", "  ",
    "x\0.safetensors", 7, None, ["x"], {"x": 1}, "link.safetensors", "linked/x.safetensors", "..",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, links out of it, and a file outside."""
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_tensors(elsewhere / "x.safetensors", {"w": torch.ones(2)})
    write_tensors(folder / "x.safetensors", {"w": torch.zeros(2)})
    (folder / "link.safetensors").symlink_to(elsewhere / "x.safetensors")
    (folder / "linked").symlink_to(elsewhere)
    return folder


@pytest.mark.parametrize("name", OUTSIDE, ids=[repr(name) for name in OUTSIDE])
def test_names_that_lead_out_are_refused_and_not_opened(
    folder: Path, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"inside|outside"):
        inside(folder, name, named_in="index.json")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))

    def opened(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a file outside was opened")

    monkeypatch.setattr("frugal.tensor_files._header", opened)
    with pytest.raises(ModelError):
        stored_tensors(folder)


def test_names_inside_are_taken(folder: Path) -> None:
    (folder / "part").mkdir()
    (folder / "again.safetensors").symlink_to(folder / "x.safetensors")
    for name in (
        "x.safetensors",
        "part/y.safetensors",
        "./x.safetensors",
        "again.safetensors",
        "..x",
        "名.safetensors",
    ):
        assert inside(folder, name, named_in="index.json") == folder / name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "x.safetensors"}}))
    assert torch.equal(stored_tensors(folder)["w"].read(), torch.zeros(2))


def test_links_of_the_hub_cache_are_inside(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--org--name"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    shutil.copy(folder / "x.safetensors", model / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert torch.equal(stored_tensors(snapshot)["w"].read(), torch.zeros(2))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "x.safetensors")
    with pytest.raises(ModelError, match="outside"):
        stored_tensors(snapshot)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": 7}}', "{"])
def test_a_damaged_index_is_one_message(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        stored_tensors(folder)


def test_one_tensor_in_two_files(folder: Path) -> None:
    write_tensors(folder / "y.safetensors", {"w": torch.ones(2)})
    with pytest.raises(ModelError, match=r"w is in x\.safetensors and in y\.safetensors"):
        read_headers([folder / "x.safetensors", folder / "y.safetensors"])
