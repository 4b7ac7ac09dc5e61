"""Safetensors, one tensor at a time: read into memory of its own, and write from headers known beforehand.

The safetensors library maps the file: pages read stay in the process until the file is closed, which for a large
checkpoint is the whole model in 16 bit. Reading with `readinto` holds the tensor (or the rows) asked for, nothing else.
Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from frugal.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20  # the safetensors library's own limit

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
    def dtype_name(self) -> str:
        """The format's name of the dtype."""
        return _NAMES[self.dtype]

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def read(self, start: int = 0, stop: int | None = None, *, handle: IO[bytes] | None = None) -> torch.Tensor:
        """Rows ``start:stop`` on the CPU, in memory of their own (all rows by default; a scalar has one row).

        ``handle``: the file, where it is open already. Raises ModelError when the file ends too early.
        """
        if handle is None:
            with open(self.file, "rb", buffering=0) as opened:
                return self.read(start, stop, handle=opened)
        stop = self.rows if stop is None else min(stop, self.rows)
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        buffer = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        handle.seek(self.begin + start * row_bytes)
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            count = handle.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise ModelError(f"{self.file}: the file ends inside tensor {self.name}. Fetch or copy it again.")
            done += count
        return buffer.view(self.dtype).view(shape)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) over the whole tensor, each block about ``block_bytes``."""
        row_bytes = max(1, prod(self.shape[1:]) * self.dtype.itemsize)
        step = max(1, block_bytes // row_bytes)
        for start in range(0, self.rows, step):
            yield start, self.read(start, start + step)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file holds, from its header alone.

    Raises:
        ModelError: the file is truncated or no safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{file} is damaged or no safetensors file: its header does not fit. Download it again.")
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise ModelError(f"{file} is damaged: its header is not JSON. Download it again.") from error
    found: dict[str, StoredTensor] = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        if value["dtype"] not in _DTYPES:
            raise ModelError(f"{file.name}: tensors of type {value['dtype']} cannot be read.")
        begin, end = value["data_offsets"]
        if not 0 <= begin <= end or 8 + length + end > size:
            raise ModelError(f"{file} is damaged: {name} ends beyond the end of the file. Download it again.")
        tensor = StoredTensor(name, file, _DTYPES[value["dtype"]], tuple(value["shape"]), 8 + length + begin)
        if tensor.n_bytes != end - begin:
            raise ModelError(f"{file} is damaged: {name} has {end - begin} bytes, which is not {tensor.shape}.")
        found[name] = tensor
    return found


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """The header of a file that holds (name, dtype, shape) in this order, and the bytes of all tensors behind it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, as the reference implementation writes them
    return len(text).to_bytes(8, "little") + text, offset


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose bytes depend on its content alone (the library's own writer shuffles metadata).

    ``tensors`` are contiguous and on the CPU. Larger types come first, as the format wants for alignment.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    described = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order]
    header, _ = header_bytes(described, dict(sorted(metadata.items())))
    with open(path, "wb") as handle:
        handle.write(header)
        for name in order:
            handle.write(memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
