"""Safetensors, one tensor at a time: read by seeking, write a shard whose header is known beforehand.

Neither side maps a file or holds a shard: the memory in use is one tensor, or one block of rows of it. Format:
https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from frugal.errors import CheckpointError, ModelError
from frugal.files import fsync_folder, write_json
from frugal.models.source import missing_weights, weight_files
from frugal.models.tensor_file import read_entries

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes."""

BLOCK_BYTES = 8 << 20
"""Size of one block of rows when a tensor is copied or converted."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte from the start of the file."""

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start:stop`` as a tensor of its own memory (all rows by default; a scalar has one row)."""
        stop = self.rows if stop is None else min(stop, self.rows)
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        if prod(shape) == 0:
            return torch.empty(shape, dtype=self.dtype)
        block = bytearray((stop - start) * row_bytes)
        with open(self.file, "rb", buffering=0) as handle:
            handle.seek(self.begin + start * row_bytes)
            view = memoryview(block)
            filled = 0
            while filled < len(block):
                got = handle.readinto(view[filled:])
                if not got:
                    raise ModelError(f"{self.file}: the file ends inside tensor {self.name}. Fetch or copy it again.")
                filled += got
        return torch.frombuffer(block, dtype=self.dtype).view(shape)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) over the whole tensor, each block about ``block_bytes``."""
        row_bytes = max(1, prod(self.shape[1:]) * self.dtype.itemsize)
        step = max(1, block_bytes // row_bytes)
        for start in range(0, self.rows, step):
            yield start, self.read(start, start + step)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; ModelError when the file is damaged."""
    return {
        name: StoredTensor(name, file, entry.dtype, entry.shape, entry.begin)
        for name, entry in read_entries(file).items()
    }


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder (`model.safetensors`, or its shards by the index), in the order of the files.

    Raises:
        ModelError: no safetensors there, or the index names a file that is missing.
    """
    if missing := missing_weights(folder):
        raise ModelError(f"{folder} is incomplete: missing {', '.join(missing)}.")
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors.update(sorted(read_header(file).items(), key=lambda item: item[1].begin))
    return tensors


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write: what it will be, and how its rows are made, block by block, when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterable[torch.Tensor]]

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def plan_shards(tensors: Iterable[OutTensor], max_shard_bytes: int) -> list[list[OutTensor]]:
    """Group tensors, in order, into shards of at most ``max_shard_bytes`` (a larger tensor has a shard of its own)."""
    shards: list[list[OutTensor]] = []
    used = 0
    for tensor in tensors:
        if not shards or used + tensor.n_bytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.n_bytes
    return shards


def write_shards(folder: Path, shards: list[list[OutTensor]]) -> int:
    """Write ``model.safetensors``, or ``model-0000i-of-0000n.safetensors`` with the index. Returns bytes of tensors."""
    total = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_shard(folder / name, shard)
        weight_map.update({tensor.name: name for tensor in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    fsync_folder(folder)
    return total


def write_shard(file: Path, tensors: list[OutTensor], metadata: Mapping[str, str] | None = None) -> int:
    """Write one safetensors file tensor by tensor and flush it to disk. Returns the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, as the reference implementation writes them
    try:
        with open(file, "wb") as handle:
            handle.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                _write_tensor(handle, tensor)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise CheckpointError(f"Cannot write {file}: {error}. Free space or choose another folder.") from error
    return offset


def _write_tensor(handle: BinaryIO, tensor: OutTensor) -> None:
    written = 0
    for block in tensor.make():
        if block.dtype != tensor.dtype:
            raise TypeError(f"{tensor.name}: a block of {block.dtype} where {tensor.dtype} was promised")
        if block.numel():
            flat = block.detach().contiguous().cpu().view(-1).view(torch.uint8)
            written += handle.write(flat.numpy().data)
    if written != tensor.n_bytes:
        raise ValueError(f"{tensor.name}: {written} bytes made where its shape {tensor.shape} needs {tensor.n_bytes}")
