"""A scratch file for what is written once and read back once: layer inputs that neither device nor host should hold.

The file has no name once it is open (on POSIX it is unlinked at once, on Windows deleted on close), so nothing is left
behind by a run that ends, fails or is killed. Space is reserved before it is written: a full disk shows as an error at
the first layer, not in the middle of backward.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import torch

from frugal.errors import MemoryBudgetError
from frugal.memory.space import Regions
from frugal.units import disk_size


class ScratchFile:
    """Regions of one file, given out like a stack: the last one taken is usually the first one given back."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="frugal-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise MemoryBudgetError(
                f"memory.checkpoint: disk needs a scratch file and cannot write to {self.folder} ({error.strerror}). "
                "Set memory.scratch_dir to a folder that can be written to."
            ) from error
        self._reserved = 0
        self._regions = Regions()
        self.peak_bytes = 0

    def take(self, nbytes: int) -> int:
        """Reserve ``nbytes``; returns the offset. Raises MemoryBudgetError when the disk has no room."""
        offset = self._regions.take(nbytes)
        try:
            self._reserve(offset + Regions.rounded(nbytes))
        except BaseException:
            self._regions.give_back(offset, nbytes)
            raise
        self.peak_bytes = max(self.peak_bytes, self._regions.top)
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a region."""
        self._regions.give_back(offset, nbytes)

    def _reserve(self, end: int) -> None:
        if end <= self._reserved:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), self._reserved, end - self._reserved)
            else:
                self._file.truncate(end)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(self.folder).free
            raise MemoryBudgetError(
                f"the scratch file of memory.checkpoint: disk needs {disk_size(end)} in {self.folder}, which has "
                f"{disk_size(free)} left. Free some, set memory.scratch_dir to another disk, or shorten the rows."
            ) from error
        self._reserved = end

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Write a contiguous CPU tensor's bytes."""
        self._file.seek(offset)
        rest = _bytes_of(tensor)
        while rest:
            rest = rest[self._file.write(rest) :]

    def read(self, offset: int, tensor: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes at ``offset``."""
        self._file.seek(offset)
        rest = _bytes_of(tensor)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise OSError(f"the scratch file in {self.folder} ended early at byte {self._file.tell()}")
            rest = rest[count:]

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as bytes, whatever its dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
