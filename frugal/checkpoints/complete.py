"""Which checkpoints are complete, and which of a run is the newest. Reads JSON and hashes files, imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from frugal.checkpoints.rotation import list_checkpoints
from frugal.errors import ModelError
from frugal.files import inside, read_json, sha256_file

MARKER = "complete.json"
"""Lists every file of a complete checkpoint with its size and hash; written last."""
FORMAT = 1
ADAPTER_FILE = "adapter_model.safetensors"
_NEEDED = (ADAPTER_FILE, "adapter_config.json", "optimizer.safetensors", "rng.safetensors", "trainer_state.json")


def why_incomplete(folder: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, None when every file is there and as it was written."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"{MARKER} is missing: the save did not finish"
    try:
        files = read_json(marker)["files"]
        entries = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return f"{MARKER} cannot be read"
    for name in _NEEDED:
        if name not in entries:
            return f"{MARKER} does not list {name}"
    for name, (count, digest) in entries.items():
        path = folder / name
        try:
            inside(folder, name, named_in=MARKER)
        except ModelError as error:
            return str(error)
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != count:
            return f"{name} has {path.stat().st_size:,} bytes instead of {count:,}"
        if hashes and sha256_file(path) != digest:
            return f"{name} is not what was written (SHA-256 differs)"
    return None


def find_latest(run_dir: Path, say: Callable[[str], None] = print, *, hashes: bool = True) -> Path | None:
    """The complete checkpoint with the highest number, or None; names each one that it skips."""
    for _, folder in reversed(list_checkpoints(run_dir)):
        reason = why_incomplete(folder, hashes=hashes)
        if reason is None:
            return folder
        say(f"skipped {folder}: {reason}")
    return None
