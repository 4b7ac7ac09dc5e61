"""Writing a model folder's shards, tensor by tensor.

No shard is mapped or held: the memory in use is one tensor, or one block of rows of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from frugal.errors import CheckpointError
from frugal.files import fsync_folder, write_json
from frugal.tensor_files import header_bytes


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
    described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    header, total = header_bytes(described, {"format": "pt", **(metadata or {})})
    try:
        with open(file, "wb") as handle:
            handle.write(header)
            for tensor in tensors:
                _write_tensor(handle, tensor)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise CheckpointError(f"Cannot write {file}: {error}. Free space or choose another folder.") from error
    return total


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
