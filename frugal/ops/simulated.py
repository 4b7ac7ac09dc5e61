"""Tensors without memory, which plans are made of: the device they stand for, and loops cut short for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")


def is_fake(value: Any) -> bool:
    """A fake tensor of any device, or a tensor on the ``meta`` device: it has a shape and no values.

    Plans for GPUs run on plain ``meta`` tensors, which torch's C++ handles several times as fast as fake ones.
    """
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.device.type == "meta")


@dataclass(frozen=True)
class SimulatedDevice:
    """The kind of device that a plan is for."""

    kind: str
    """cpu or cuda."""
    capability: tuple[int, int] | None = None
    attention: str = "auto"
    """memory.attention of the configuration."""


_PLANNED: ContextVar[SimulatedDevice | None] = ContextVar("frugal_simulated_device", default=None)


_TARGETS: ContextVar[int | None] = ContextVar("frugal_simulated_targets", default=None)


@contextmanager
def simulating(device: SimulatedDevice, *, targets: int | None = None) -> Iterator[None]:
    """Fake tensors inside stand for tensors of ``device``, and ``targets`` of a micro-batch's tokens are trained."""
    token, count = _PLANNED.set(device), _TARGETS.set(targets)
    try:
        yield
    finally:
        _PLANNED.reset(token)
        _TARGETS.reset(count)


def simulated_targets(tokens: int) -> int:
    """How many of ``tokens`` are trained: all of them where the plan does not know."""
    known = _TARGETS.get()
    return tokens if known is None else max(1, min(known, tokens))


def simulated_device() -> SimulatedDevice | None:
    """The device that is planned for, inside `simulating`."""
    return _PLANNED.get()


def stands_for_cuda(tensor: Tensor) -> bool:
    """Whether a tensor is a fake one of a GPU that is planned for."""
    return tensor.device.type == "meta"


def sampled(pieces: Sequence[T], tensor: Tensor) -> Sequence[T]:
    """The pieces that a loop has to walk over: all of them, or for fake tensors the first two and the last.

    Only for loops whose pieces are alike and leave nothing behind: their peak is that of any one of them.
    """
    if len(pieces) <= 3 or not is_fake(tensor):
        return pieces
    return [pieces[0], pieces[1], pieces[-1]]
