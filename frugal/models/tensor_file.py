"""Reading safetensors one tensor at a time into memory of its own.

The safetensors library maps the file: pages read stay in the process until the file is closed, which for a large
checkpoint is the whole model in 16 bit. Reading with `readinto` holds the tensor asked for and nothing else.
Format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
_MAX_HEADER_BYTES = 100 << 20  # the safetensors library's own limit


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a file."""

    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    """Byte offset from the start of the file."""
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; raises ModelError for one that is not known."""
        if self.dtype_name not in _DTYPES:
            raise ModelError(f"{self.path.name}: tensors of type {self.dtype_name} cannot be read.")
        return _DTYPES[self.dtype_name]


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors that a safetensors file holds, from its header alone.

    Raises:
        ModelError: the file is truncated or no safetensors file.
    """
    size = path.stat().st_size
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is damaged or no safetensors file: its header does not fit. Download it again.")
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise ModelError(f"{path} is damaged: its header is not JSON. Download it again.") from error
    entries: dict[str, TensorEntry] = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        begin, end = value["data_offsets"]
        entry = TensorEntry(path, value["dtype"], tuple(value["shape"]), 8 + length + begin, end - begin)
        if not 0 <= begin <= end or 8 + length + end > size:
            raise ModelError(f"{path} is damaged: {name} ends beyond the end of the file. Download it again.")
        if entry.nbytes != math.prod(entry.shape) * entry.dtype.itemsize:
            raise ModelError(f"{path} is damaged: {name} has {entry.nbytes} bytes, which is not {entry.shape}.")
        entries[name] = entry
    return entries


def read_tensor(handle: IO[bytes], entry: TensorEntry) -> torch.Tensor:
    """One tensor, on the CPU, from its open file."""
    buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
    handle.seek(entry.begin)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    done = 0
    while done < entry.nbytes:
        count = handle.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ModelError(f"{entry.path} ended while a tensor was read. Download it again.")
        done += count
    return buffer.view(entry.dtype).view(entry.shape)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose bytes depend on its content alone (the library's own writer shuffles metadata).

    ``tensors`` are contiguous and on the CPU. Larger types come first, as the format wants for alignment.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            handle.write(memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
