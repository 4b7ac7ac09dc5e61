"""Safetensors: what the format's own library writes is read, and the other way round; damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from frugal.errors import CheckpointError, ModelError
from frugal.tensor_files import map_arrays, read_all, read_header, read_headers, read_tensors, write_tensors

TENSORS = {
    "codes": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).t(),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "flags": torch.tensor([True, False]),
}


def same(got: dict[str, torch.Tensor]) -> bool:
    return got.keys() == TENSORS.keys() and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], tensor) for name, tensor in TENSORS.items()
    )


def test_files_go_both_ways_between_the_library_and_frugal(tmp_path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs")
    assert same(read_all(tmp_path / "theirs"))
    write_tensors(tmp_path / "ours", TENSORS, {"n": [1]})
    assert same(load_file(tmp_path / "ours"))
    got, meta = read_tensors(tmp_path / "ours")
    assert same(got)
    assert meta == {"n": [1]}


def test_the_bytes_depend_on_the_content_alone(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", TENSORS, {"n": 1}, texts={"x": "1", "b": "2"})
    write_tensors(tmp_path / "b", dict(reversed(TENSORS.items())), {"n": 1}, texts={"b": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_arrays_are_mapped_and_may_be_empty(tmp_path: Path) -> None:
    tensors = {"ids": torch.arange(6, dtype=torch.int32).view(2, 3), "none": torch.empty(0, 4, dtype=torch.int64)}
    with pytest.raises(AssertionError, match="none has no elements"):
        write_tensors(tmp_path / "f", tensors)
    write_tensors(tmp_path / "f", tensors, allow_empty=True)
    arrays = map_arrays(tmp_path / "f")
    assert isinstance(arrays["ids"], np.memmap)
    assert arrays["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["none"].shape == (0, 4)
    assert arrays["none"].dtype == np.int64


def test_several_files_are_one_dictionary_in_the_order_of_the_data(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1", {"b": torch.zeros(1), "a": torch.zeros(2)})
    write_tensors(tmp_path / "2", {"c": torch.zeros(3)})
    assert list(read_headers([tmp_path / "2", tmp_path / "1"])) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "not JSON"),
        (b"[1, 2]", "no JSON object"),
        (json.dumps({"a": {"dtype": "F32"}}).encode(), "does not describe a"),
        (json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode(), "ends beyond the end"),
        (json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode(), "which is not"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match=message):
        read_header(path)
    with pytest.raises(CheckpointError, match=message):
        read_tensors(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_tensors(tmp_path / "absent.safetensors")
