"""Checkpoints of a run folder: their names and order, which are deleted, and the disk space they need."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from frugal.errors import CheckpointError
from frugal.units import disk_size

if TYPE_CHECKING:
    from torch import nn

STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.1}
"""Bytes of optimizer state a trained element: two fp32 moments, or two 8-bit ones with their block scales."""

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(checkpoint-\d+)\.[0-9a-f]+\.(tmp|old)")


def checkpoint_step(folder: Path) -> int | None:
    """Step of a folder `checkpoint-N`, None for other names."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every `checkpoint-N`, complete or not, lowest number first (9 before 10), links left out."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        return []
    found = [(checkpoint_step(path), path) for path in run_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted((step, path) for step, path in found if step is not None)


def aside(run_dir: Path, step: int, kind: str) -> Path:
    """A name beside `checkpoint-N` that nobody takes for a checkpoint; ``kind`` is tmp or old."""
    return Path(run_dir) / f".checkpoint-{step}.{secrets.token_hex(6)}.{kind}"


def leftovers(run_dir: Path) -> list[tuple[Path, str, str]]:
    """(path, checkpoint name, kind) of what a killed process left behind."""
    found = []
    for path in sorted(Path(run_dir).iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match:
            found.append((path, match.group(1), match.group(2)))
    return found


def remove(folder: Path, step: int) -> None:
    """Delete a checkpoint; a kill in the middle leaves no half of it under its own name."""
    gone = aside(folder.parent, step, "tmp")
    folder.rename(gone)
    shutil.rmtree(gone)


def rotate(run_dir: Path, *, limit: int | None, best_step: int | None, ours: Callable[[Path], bool]) -> list[Path]:
    """Delete the oldest checkpoints beyond ``limit``; the newest and that of ``best_step`` stay. Returns the deleted.

    The best one counts as kept, but never pushes out the newest: with a limit of 1 two may stay. Only folders that are
    ``ours``, complete checkpoints of this run, count and go.
    """
    if limit is None:
        return []
    found = [(step, folder) for step, folder in list_checkpoints(run_dir) if ours(folder)]
    protected = {found[-1][0]} if found else set()
    if best_step is not None:
        protected.add(best_step)
    surplus = len(found) - limit
    deleted = []
    for step, folder in found:
        if surplus <= 0:
            break
        if step in protected:
            continue
        remove(folder, step)
        deleted.append(folder)
        surplus -= 1
    return deleted


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = Path(folder).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write to the disk of ``folder``."""
    return shutil.disk_usage(existing_parent(folder)).free


def checkpoint_bytes(parameters: dict[str, nn.Parameter], optim: str) -> int:
    """Size of one checkpoint: trained tensors, their optimizer state, and 1 MB of small files."""
    elements = sum(parameter.numel() for parameter in parameters.values())
    stored = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    return int(stored + elements * STATE_BYTES[optim]) + 1_000_000


def check_space(run_dir: Path, *, one_bytes: int, kept: int) -> None:
    """Raise CheckpointError when ``kept`` checkpoints and the one being written do not fit.

    ``kept``: checkpoints that stay at the same time, the best one included.
    """
    need, free = one_bytes * (kept + 1), free_bytes(run_dir)
    if need > free:
        raise CheckpointError(
            f"{run_dir}: {kept} checkpoints of {disk_size(one_bytes)} and one being written need {disk_size(need)} "
            f"({need:,} bytes), {disk_size(free)} ({free:,} bytes) are free there. "
            "Free some space, lower output.save_total_limit, or set another output.dir."
        )


def kept_at_once(limit: int | None, keep_best: bool, total_saves: int) -> int:
    """Most checkpoints that lie in the folder at the same time."""
    most = total_saves if limit is None else limit + int(keep_best)
    return min(most, total_saves)
