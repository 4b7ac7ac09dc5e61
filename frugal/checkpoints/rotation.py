"""Which checkpoints a run folder holds, in order of their number, and which of them go."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(checkpoint-\d+)\.[0-9a-f]+\.(tmp|old)")


def checkpoint_step(folder: Path) -> int | None:
    """Step of a folder `checkpoint-N`, None for other names."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every `checkpoint-N`, complete or not, lowest number first (9 before 10)."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        return []
    found = [(checkpoint_step(path), path) for path in run_dir.iterdir() if path.is_dir()]
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


def rotate(run_dir: Path, *, limit: int | None, best_step: int | None) -> list[Path]:
    """Delete the oldest checkpoints beyond ``limit``; the newest and that of ``best_step`` stay. Returns the deleted.

    The best one counts as kept, but never pushes out the newest: with a limit of 1 two may stay.
    """
    if limit is None:
        return []
    found = list_checkpoints(run_dir)
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
