"""Disk space, before and while writing."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from frugal.errors import CheckpointError
from frugal.units import disk_size

STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.1}
"""Bytes of optimizer state a trained element: two fp32 moments, or two 8-bit ones with their block scales."""


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
