"""Tensor files of a checkpoint: safetensors only. Nothing here can execute what it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from frugal.errors import CheckpointError

PICKLE_NAMES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_PICKLE_MAGIC = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))
_LARGEST_HEADER = 100_000_000


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any] | None = None) -> None:
    """Write tensors, dtypes and bytes as they are, with ``meta`` as JSON in the header.

    Raises OSError when the disk refuses, as writing any other file would.
    """
    seen: set[int] = set()
    ready: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise AssertionError(f"{name} has no elements: a placeholder of a sharded tensor must not be saved")
        plain = tensor.detach().to("cpu").contiguous()
        if plain.data_ptr() in seen:  # safetensors refuses tensors that share memory (quantisation tables do)
            plain = plain.clone()
        seen.add(plain.data_ptr())
        ready[name] = plain
    try:
        save_file(ready, path, metadata={"format": "pt", "frugal": json.dumps(meta or {})})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a file of `write_tensors` to the CPU. Raises CheckpointError, naming the file, when it is anything else."""
    refuse_pickle(path)
    try:
        with open(path, "rb") as handle:
            claimed = int.from_bytes(handle.read(8), "little")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not 2 <= claimed <= min(_LARGEST_HEADER, path.stat().st_size - 8):
        raise CheckpointError(f"{path} is not a safetensors file: its header claims {claimed:,} bytes")
    try:
        with safe_open(path, framework="pt") as opened:
            meta = json.loads((opened.metadata() or {}).get("frugal", "{}"))
            return {name: opened.get_tensor(name) for name in opened.keys()}, meta  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError) as error:
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
