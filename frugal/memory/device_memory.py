"""A GPU's memory as a run finds it: what others use of it, how it is held to a budget, how its allocator works.

What lies outside of torch's allocator is not measured but stated: the context with the kernels that libraries load.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from frugal.device import Device
from frugal.errors import ConfigError
from frugal.units import gib

_MIB = 1 << 20
CUDA_CONTEXT_BYTES = 550 * _MIB
"""Context and loaded kernels of torch, cuBLAS and bitsandbytes, in the course of a run."""
YOUNG_CONTEXT_BYTES = 300 * _MIB
"""The same before a run has loaded its kernels."""
_DRIVERS_OWN = 256 * _MIB
"""Use by others below that is no news."""


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory at one moment."""

    total_bytes: int
    free_bytes: int
    own_bytes: int
    """Of this process: reserved by torch's allocator, and outside of it."""

    @property
    def others_bytes(self) -> int:
        """In use by a desktop, other processes, or what other libraries hold in this one."""
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)


def used_by_others(others_bytes: int, total_bytes: int) -> str:
    """What to say about others' use of a device; empty where it is next to nothing."""
    if others_bytes < _DRIVERS_OWN:
        return ""
    return f"{gib(others_bytes)} of the device's {gib(total_bytes)} are in use by others (nvidia-smi shows whose)"


def look(device: Device, *, outside_bytes: int = YOUNG_CONTEXT_BYTES) -> DeviceMemory | None:
    """The memory of a CUDA device of this machine now; None for others. ``outside_bytes``: of this process, beside its
    allocator."""
    if device.kind != "cuda" or not device.here or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device.torch_device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device.torch_device) + outside_bytes)


def spills() -> bool:
    """Whether the driver answers a full GPU with host memory instead of an error, as on Windows and under WSL: nothing
    fails there, and every step takes ten times as long."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


@contextlib.contextmanager
def limited(device: Device, budget_bytes: int | None, others_bytes: int = 0) -> Iterator[None]:
    """Hold torch's allocator to ``budget_bytes`` of a GPU, the context counted, and afterwards to nothing.

    Without a budget to what others leave, where the driver would spill to host memory.

    Raises ConfigError for a budget that the context alone takes.
    """
    if device.kind != "cuda" or (budget_bytes is None and not spills()):
        yield
        return
    if budget_bytes is not None and budget_bytes <= CUDA_CONTEXT_BYTES:
        raise ConfigError(
            f"memory.budget: {gib(budget_bytes)} is less than CUDA itself takes on a device "
            f"({gib(CUDA_CONTEXT_BYTES)}, before any tensor). Write a larger one, or auto."
        )
    left = device.total_bytes - others_bytes
    tensors = (left if budget_bytes is None else min(left, budget_bytes)) - CUDA_CONTEXT_BYTES
    fraction = min(1.0, max(0.0, tensors / device.total_bytes))
    torch.cuda.set_per_process_memory_fraction(fraction, device.torch_device)
    try:
        yield
    finally:
        # the next run of this process has a budget of its own, or none
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch_device)


_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments() -> str | None:
    """Let CUDA's allocator grow its segments instead of keeping one for every size it met: micro-batches have another
    length each time, which leaves holes that nothing fits (a third of the memory, where it is nearly full).

    What the user set in the environment stays. Returns what to say where it could not be done, or came late.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None or sys.platform == "win32":
        return None
    asked = next((os.environ[name] for name in _CONF if os.environ.get(name)), "")
    if "expandable_segments" in asked:
        return None
    late = torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0
    try:
        # the former settings are said again: some versions forget what is not named
        torch.cuda.memory._set_allocator_settings(",".join(filter(None, [asked, "expandable_segments:True"])))
    except (AttributeError, RuntimeError, ValueError) as error:
        return (
            f"the device's allocator keeps its settings ({type(error).__name__}): where memory is nearly full, start "
            "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if late:
        held = gib(torch.cuda.memory_reserved())
        return f"{held} of the device were reserved before this run and stay cut as they are; a fresh process has them"
    return None
