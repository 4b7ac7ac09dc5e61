"""Signs that memory is used up, and how much of the host's is left."""

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
