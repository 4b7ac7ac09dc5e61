"""What every export format is given, and the folder that it is written into."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from frugal.checkpoints.run_folder import RunFolder
from frugal.errors import CheckpointError
from frugal.files import fsync_folder
from frugal.models.resolve import ResolvedModel
from frugal.units import disk_size


class Report(Protocol):
    """What an export says about itself."""

    def lines(self) -> list[str]:
        """The report as lines of text for the terminal."""
        ...


@dataclass(frozen=True)
class Export:
    """A trained adapter that is to be written in some format, and its base, found and compared already."""

    run: RunFolder
    base: ResolvedModel
    out: Path
    """The folder that will hold the result."""
    warnings: list[str]
    """What the user should know; formats add to it."""
    trust_remote_code: bool = False


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to write into; it becomes ``out`` when the block ends without an error, and goes otherwise.

    Raises CheckpointError when the disk refuses.
    """
    beside = out.with_name(f".{out.name}.exporting")
    shutil.rmtree(beside, ignore_errors=True)  # left by an export that was killed
    try:
        beside.mkdir(parents=True)
        yield beside
        fsync_folder(beside)
        if out.exists():
            out.rmdir()
        beside.rename(out)
        fsync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"Cannot write {out}: {error}. Free space or choose another folder.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_empty(out: Path) -> Path:
    """``out`` as an absolute path. Raises CheckpointError when something is there already."""
    out = out.expanduser().absolute()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty. Choose a new folder for the result, or remove it.")
    return out


def check_space(out: Path, n_bytes: int) -> None:
    """Raise CheckpointError when ``n_bytes`` and some small files do not fit on the disk of ``out``."""
    folder = out.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < n_bytes * 1.02 + (32 << 20):
        raise CheckpointError(
            f"{folder} has {disk_size(free)} free, the result needs {disk_size(n_bytes)}. "
            "Free space or choose another folder."
        )
