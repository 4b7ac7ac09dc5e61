"""A short name for a base model's weights, to notice an adapter on another base (same shapes, other numbers)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from frugal.models.checkpoint_files import StoredTensor, read_header
from frugal.models.resolve import weight_files

_PIECE = 64  # bytes
_PIECES = 4  # a tensor


def base_fingerprint(folder: Path) -> str:
    """SHA-256 over every tensor's name, type and shape and 256 bytes sampled from it; hex.

    Takes milliseconds for any size, reads no whole tensor, and does not depend on how the weights are cut into files.
    Weights stored in another dtype have another fingerprint.
    """
    entries: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        entries.update(read_header(path))
    digest = hashlib.sha256()
    handles = {path: open(path, "rb", buffering=0) for path in {entry.file for entry in entries.values()}}  # noqa: SIM115
    try:
        for name in sorted(entries):
            entry = entries[name]
            digest.update(f"{name}\0{entry.dtype_name}\0{entry.shape}\0".encode())
            for piece in range(_PIECES):
                start = max(0, entry.n_bytes - _PIECE) * piece // (_PIECES - 1)
                handles[entry.file].seek(entry.begin + start)
                digest.update(handles[entry.file].read(min(_PIECE, entry.n_bytes)))
    finally:
        for handle in handles.values():
            handle.close()
    return digest.hexdigest()
