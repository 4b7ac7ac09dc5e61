"""Reading numbers off a GPU while other processes may end.

With NCCL an operation that waits for a process that is gone runs on the device, and a read of its result sits in the
driver: no exception, no signal handler (they run between Python's instructions), until a watchdog ends it minutes
later. Here the wait is Python's: an event behind the queued work is asked, and between two questions a loss of another
process is noticed and Ctrl-C arrives. Every read of a device value that follows an operation of all ranks goes through
`numbers`.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from frugal.distributed import group
from frugal.errors import ProcessLost

LOOK_SECONDS = 0.5
"""Between two looks at the other processes."""
LONGEST_PAUSE = 1e-3
"""Between two questions to the device: what a step may lose by asking."""


class Event(Protocol):
    """What is asked whether the device has come so far; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...


def numbers(tensor: Tensor) -> list[float]:
    """The values of a small tensor, flat. Raises ProcessLost when another process ends before the device has them."""
    _arrived(tensor)
    found: list[float] = tensor.flatten().tolist()
    return found


def number(tensor: Tensor) -> float:
    """The value of a tensor with one, as `numbers` reads it; of a plan's tensors, which have none, a stand-in."""
    _arrived(tensor)
    return float(tensor)


def _arrived(tensor: Tensor) -> None:
    if tensor.device.type == "cuda" and group.world_size() > 1:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        wait(event)


def wait(event: Event) -> None:
    """Return when the device has reached ``event``.

    Raises ProcessLost when another process has ended or stopped; operations that wait for it are given up first, or
    this process could not end either.
    """
    pause, look = 2e-5, time.monotonic() + LOOK_SECONDS
    while not event.query():
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        if time.monotonic() < look:
            continue
        reason = group.lost()
        if reason is not None:
            group.give_up()
            raise ProcessLost(reason)
        look = time.monotonic() + LOOK_SECONDS
