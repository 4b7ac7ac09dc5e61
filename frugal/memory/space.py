"""Space on host and disk, given out in regions, and the signs that memory is used up."""

from __future__ import annotations

import psutil
import torch

from frugal.memory.meter import OutOfBudget

HOST_RESERVE_BYTES = 256 << 20
"""Left alone of the host's memory: below it the operating system begins to end processes."""


class OutOfHostMemory(RuntimeError):
    """A buffer on the host would take the last of its memory."""


def refuse_when_host_is_full(nbytes: int) -> None:
    """Raise OutOfHostMemory when ``nbytes`` more would leave less than the reserve."""
    available = int(psutil.virtual_memory().available)
    if nbytes + HOST_RESERVE_BYTES > available:
        raise OutOfHostMemory(f"{nbytes:,} bytes wanted on the host, {available:,} are available")


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's out-of-memory, the budget's, the host's reserve, or the CPU allocator's refusal."""
    if isinstance(error, torch.OutOfMemoryError | OutOfBudget | OutOfHostMemory | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


class Regions:
    """Allocates regions of one long space (a file, or host memory in slabs) like a stack, in whole pages.

    Layers store their inputs in order and fetch them in the opposite one, so the region taken last is usually given
    back first, and the space ends where the deepest layer's ends.
    """

    PAGE_BYTES = 4096

    def __init__(self) -> None:
        self.top = 0
        """End of the last region that is in use."""
        self._free: dict[int, int] = {}
        """Offset -> bytes of regions given back that do not touch the top."""

    def take(self, nbytes: int) -> int:
        """Offset of a region of at least ``nbytes``."""
        nbytes = self.rounded(nbytes)
        for offset, size in self._free.items():
            if size == nbytes:
                del self._free[offset]
                return offset
        offset, self.top = self.top, self.top + nbytes
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a region that `take` gave for ``nbytes``."""
        self._free[offset] = self.rounded(nbytes)
        while self._free:
            last = max(self._free)
            if last + self._free[last] != self.top:
                break
            self.top = last
            del self._free[last]

    @classmethod
    def rounded(cls, nbytes: int) -> int:
        """``nbytes`` in whole pages."""
        return -(-max(nbytes, 1) // cls.PAGE_BYTES) * cls.PAGE_BYTES
