"""Space on host and disk, given out in regions, and the signs that memory is used up."""

from __future__ import annotations

import errno
import gc
import re
import traceback
from dataclasses import dataclass

import torch

from frugal import host_memory
from frugal.memory.meter import OutOfBudget

HOST_RESERVE_BYTES = 256 << 20
"""Left alone of the host's memory: below it the operating system begins to end processes."""


class OutOfHostMemory(RuntimeError):
    """A buffer on the host would take the last of its memory."""


def refuse_when_host_is_full(nbytes: int) -> None:
    """Raise OutOfHostMemory when ``nbytes`` more would leave less than the reserve."""
    available = host_memory.available_bytes()
    if nbytes + HOST_RESERVE_BYTES > available:
        raise OutOfHostMemory(f"{nbytes:,} bytes wanted on the host, {available:,} are available")


_HOST = re.compile(r"DefaultCPUAllocator|cudaHostAlloc|pin(ned)? memory", re.IGNORECASE)
# The CUDA runtime and driver (pinned memory, modules, the context), Triton, NCCL and bitsandbytes: "out of memory".
# cuBLAS, cuDNN and their kin: ..._STATUS_ALLOC_FAILED.
# Not "pin memory": torch says that too where it cannot pin at all.
_ANY = re.compile(
    "out of memory|STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|DefaultCPUAllocator|cudaHostAlloc", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whoever noticed: torch's allocators, the budget, the host's reserve, or a library that
    takes memory of its own beside torch's allocator, which is what fails first when the device is nearly full."""
    if isinstance(error, torch.OutOfMemoryError | OutOfBudget | OutOfHostMemory | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_ANY.search(str(error)))


@dataclass(frozen=True)
class Shortage:
    """One out-of-memory that was recovered from: what to do about it depends on whose memory it was, and when."""

    reason: str
    host: bool = False
    """The host's memory ran out, not the device's."""
    first: bool = False
    """Nothing was tried about it yet: what failed has not been done a second time."""


def recover(error: BaseException, *, first: bool = False) -> Shortage:
    """After an out-of-memory: let go of what the failed attempt holds, caches of the device included.

    Call it before anything is tried again, with any settings. What cannot be freed yet are the frames that still run.
    """
    clear_frames(error)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Shortage(str(error), is_of_host(error), first)


def is_of_host(error: BaseException) -> bool:
    """Whether an out-of-memory is the host's."""
    known = isinstance(error, OutOfHostMemory | MemoryError | OSError)
    return known or (isinstance(error, RuntimeError) and bool(_HOST.search(str(error))))


def clear_frames(error: BaseException) -> None:
    """Clear the local variables in an error's frames: a kept traceback must not keep model and optimizer alive."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


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
