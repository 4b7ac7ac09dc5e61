"""Safetensors, one tensor at a time: read into memory of its own, and write from headers known beforehand. No pickles.

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

import numpy as np
import torch

from frugal.errors import CheckpointError, ModelError

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

PICKLE_NAMES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_PICKLE_MAGIC = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))

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
    """The tensors that a safetensors file holds, from its header alone, in the header's order.

    Raises:
        ModelError: the file is truncated or no safetensors file.
    """
    begin_of_data, header = _header(file)
    size = file.stat().st_size
    found: dict[str, StoredTensor] = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        try:
            stored, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{file} is damaged: its header does not describe {name}. Download it again.") from error
        if stored not in _DTYPES:
            raise ModelError(f"{file.name}: tensors of type {stored} cannot be read.")
        if not 0 <= begin <= end or begin_of_data + end > size:
            raise ModelError(f"{file} is damaged: {name} ends beyond the end of the file. Download it again.")
        tensor = StoredTensor(name, file, _DTYPES[stored], shape, begin_of_data + begin)
        if tensor.n_bytes != end - begin:
            raise ModelError(f"{file} is damaged: {name} has {end - begin} bytes, which is not {tensor.shape}.")
        found[name] = tensor
    return found


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of several files, in the order of the files and of the data in each. Raises as `read_header`."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in sorted(read_header(file).items(), key=lambda item: item[1].begin):
            if name in found:
                raise ModelError(f"{name} is in {found[name].file.name} and in {file.name}: it must be in one.")
            found[name] = tensor
    return found


def read_metadata(file: Path) -> dict[str, str]:
    """The texts that a safetensors file's header holds beside its tensors. Raises as `read_header`."""
    return dict(_header(file)[1].get("__metadata__") or {})


def read_all(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file on the CPU, in memory of its own. Raises as `read_header`."""
    entries = read_header(file)
    with open(file, "rb", buffering=0) as handle:
        return {name: entry.read(handle=handle) for name, entry in entries.items()}


def map_arrays(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as arrays mapped from it: nothing is read. Raises as `read_header`."""
    arrays: dict[str, np.ndarray] = {}
    for name, entry in read_header(file).items():
        dtype = torch.empty(0, dtype=entry.dtype).numpy().dtype
        arrays[name] = (
            np.memmap(file, dtype, "r", offset=entry.begin, shape=entry.shape)
            if entry.n_bytes
            else np.zeros(entry.shape, dtype)  # nothing to map
        )
    return arrays


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """(offset of the first tensor's bytes, the header's JSON)."""
    size = file.stat().st_size
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{file} is damaged or no safetensors file: its header does not fit. Download it again.")
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise ModelError(f"{file} is damaged: its header is not JSON. Download it again.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file} is damaged or no safetensors file: its header is no JSON object.")
    return 8 + length, header


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


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    allow_empty: bool = False,
) -> None:
    """Write a safetensors file whose bytes depend on its content alone (the library's own writer shuffles metadata).

    Tensors are copied to the CPU one at a time, dtypes and bytes as they are. Larger types come first, as the format
    wants for alignment. ``meta`` is kept as JSON (`read_tensors` returns it), ``texts`` as they are.

    Raises:
        OSError: the disk refuses.
        AssertionError: a tensor has no elements (a placeholder of a sharded one) and ``allow_empty`` is not set.
    """
    for name, tensor in tensors.items():
        if tensor.numel() == 0 and not allow_empty:
            raise AssertionError(f"{name} has no elements: a placeholder of a sharded tensor must not be saved")
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    described = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order]
    metadata = {"format": "pt", **(texts or {}), **({} if meta is None else {_META: json.dumps(meta)})}
    header, _ = header_bytes(described, dict(sorted(metadata.items())))
    with open(path, "wb") as handle:
        handle.write(header)
        for name in order:
            plain = tensors[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            handle.write(memoryview(plain.numpy()))  # type: ignore[arg-type]


_META = "frugal"


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and ``meta`` of a file of `write_tensors`, on the CPU.

    Raises:
        CheckpointError: it is anything else; the message names the file.
    """
    refuse_pickle(path)
    try:
        return read_all(path), json.loads(read_metadata(path).get(_META, "{}"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ModelError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle (or a torch archive of pickles) by its name or by its first bytes."""
    if path.suffix.lower() in PICKLE_NAMES:
        return True
    with open(path, "rb") as handle:
        head = handle.read(4)
    # safetensors starts with a header length: one of 0x280..0x580 bytes would look like a pickle, `{` at byte 8 tells
    if path.suffix == ".safetensors" and not head.startswith(b"PK"):
        with open(path, "rb") as handle:
            return head.startswith(_PICKLE_MAGIC) and handle.read(9)[8:] != b"{"
    return head.startswith(_PICKLE_MAGIC)


def refuse_pickle(path: Path) -> None:
    """Raise CheckpointError for a pickle: reading one would run its code."""
    if path.is_file() and is_pickle(path):
        raise CheckpointError(
            f"{path} is a pickle; reading it could run code, so frugal never does. "
            "frugal's own checkpoints hold safetensors and JSON only. Convert the file with the tool that wrote it."
        )


def refuse_pickles_in(folder: Path) -> None:
    """Raise CheckpointError when any file of a folder is a pickle."""
    for path in sorted(folder.rglob("*")):
        refuse_pickle(path)
