"""`checkpoint-N/`: whole or absent. Written beside, flushed, renamed; a marker lists every file with its hash."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from frugal.checkpoints.rotation import aside, leftovers, list_checkpoints
from frugal.checkpoints.space import free_bytes
from frugal.errors import CheckpointError
from frugal.files import fsync_file, fsync_folder, read_json, sha256_file, write_json
from frugal.tensor_files import read_tensors, refuse_pickles_in, write_tensors
from frugal.training.optim import OptimizerState
from frugal.units import disk_size

MARKER = "complete.json"
FORMAT = 1
ADAPTER_FILE = "adapter_model.safetensors"
_NEEDED = (ADAPTER_FILE, "adapter_config.json", "optimizer.safetensors", "rng.safetensors", "trainer_state.json")


@dataclass
class CheckpointParts:
    """What one checkpoint holds."""

    write_adapter: Callable[[Path], None]
    """Writes adapter_model.safetensors and adapter_config.json into the folder it is given."""
    optimizer: OptimizerState
    rng: dict[str, torch.Tensor]
    """`<rank>.<generator>` -> uint8 state."""
    state: dict[str, Any]
    """trainer_state.json."""


@dataclass
class LoadedCheckpoint:
    """A complete checkpoint, verified and read. The adapter's tensors stay in `folder / adapter_model.safetensors`."""

    folder: Path
    step: int
    optimizer: OptimizerState
    rng: dict[str, torch.Tensor]
    state: dict[str, Any]


def save_checkpoint(run_dir: Path, step: int, parts: CheckpointParts) -> Path:
    """Write `checkpoint-N`; replaces one of the same number. Returns its folder.

    Raises CheckpointError when it cannot be written (disk full, quota, read-only): nothing of it stays then, and
    earlier checkpoints are as they were.
    """
    run_dir = Path(run_dir)
    final, beside = run_dir / f"checkpoint-{step}", aside(run_dir, step, "tmp")
    try:
        beside.mkdir(parents=True)
        _write_parts(beside, step, parts)
        _swap_in(beside, final, step)
    except (OSError, SafetensorError) as error:  # PEFT's own writer reports a full disk as SafetensorError
        need = sum(path.stat().st_size for path in beside.rglob("*") if path.is_file()) if beside.exists() else 0
        raise CheckpointError(_cannot_write(final, need, error)) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return final


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
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != count:
            return f"{name} has {path.stat().st_size:,} bytes instead of {count:,}"
        if hashes and sha256_file(path) != digest:
            return f"{name} is not what was written (SHA-256 differs)"
    return None


def find_latest(run_dir: Path, say: Callable[[str], None] = print) -> Path | None:
    """The complete checkpoint with the highest number, or None; names each one that it skips."""
    for _, folder in reversed(list_checkpoints(run_dir)):
        reason = why_incomplete(folder)
        if reason is None:
            return folder
        say(f"skipped {folder}: {reason}")
    return None


def load_checkpoint(folder: Path) -> LoadedCheckpoint:
    """Verify and read a checkpoint. Raises CheckpointError for one that is incomplete or holds a pickle."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    refuse_pickles_in(folder)
    reason = why_incomplete(folder)
    if reason is not None:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {reason}")
    tensors, meta = read_tensors(folder / "optimizer.safetensors")
    rng, _ = read_tensors(folder / "rng.safetensors")
    state = _read_state(folder)
    return LoadedCheckpoint(folder, int(state["step"]), OptimizerState(tensors, meta), rng, state)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / "trainer_state.json"
    try:
        state = read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(f"{path} has format {found!r}, this version of frugal reads {FORMAT}")
    return state


def recover(run_dir: Path, say: Callable[[str], None] = print) -> None:
    """Tidy up after a killed process; only for the holder of the run's lock.

    A checkpoint that was being replaced goes back under its name if its replacement did not arrive.
    """
    for path, name, kind in leftovers(run_dir):
        final = Path(run_dir) / name
        if kind == "old" and not final.exists() and why_incomplete(path) is None:
            path.rename(final)
            say(f"restored {final}, which was being replaced when the run was killed")
        else:
            shutil.rmtree(path)


def _write_parts(folder: Path, step: int, parts: CheckpointParts) -> None:
    parts.write_adapter(folder)
    write_tensors(folder / "optimizer.safetensors", parts.optimizer.tensors, parts.optimizer.meta)
    write_tensors(folder / "rng.safetensors", parts.rng)
    write_json(folder / "trainer_state.json", {"format": FORMAT, **parts.state, "step": step})
    listed = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fsync_file(path)
            name = path.relative_to(folder).as_posix()
            listed[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    write_json(folder / MARKER, {"format": FORMAT, "step": step, "files": listed})
    fsync_folder(folder)


def _swap_in(beside: Path, final: Path, step: int) -> None:
    """Give a finished folder its name. Between the two renames a kill leaves the former one as `.old`: see recover."""
    old = aside(final.parent, step, "old")
    replaced = final.exists()
    if replaced:
        final.rename(old)
    try:
        beside.rename(final)
    except OSError:
        if replaced:
            old.rename(final)
        raise
    fsync_folder(final.parent)
    if replaced:
        shutil.rmtree(old)


def _cannot_write(final: Path, written: int, error: Exception) -> str:
    free = free_bytes(final.parent)
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(f"os error {n}" in reason for n in (28, 27, 122))
    advice = "Free some space there" if full else "Make the folder writable"
    return (
        f"cannot write {final} ({disk_size(written)} were written, {disk_size(free)} = {free:,} bytes are free there): "
        f"{reason}. The unfinished folder was removed, earlier checkpoints are whole. "
        f"{advice}, then go on with --resume."
    )
