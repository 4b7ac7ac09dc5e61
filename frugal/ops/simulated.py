"""Tensors without memory, which plans are made of: the device they stand for, and loops cut short for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from frugal.device import Device

T = TypeVar("T")


def is_fake(value: Any) -> bool:
    """A fake tensor of any device, or a tensor on the ``meta`` device: it has a shape and no values.

    Plans for GPUs run on plain ``meta`` tensors, which torch's C++ handles several times as fast as fake ones.
    """
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.device.type == "meta")


class _Simulation(NamedTuple):
    device: Device
    targets: int | None
    attention: str


_CURRENT: ContextVar[_Simulation | None] = ContextVar("frugal_simulation", default=None)


@contextmanager
def simulating(device: Device, *, targets: int | None = None, attention: str = "auto") -> Iterator[None]:
    """Fake tensors inside stand for tensors of ``device``, whether it is here or not.

    ``targets`` of a micro-batch's tokens are trained; ``attention`` is `memory.attention` of the configuration.
    """
    described = Device(device.kind, capability=device.capability, amd=device.amd, here=False)
    token = _CURRENT.set(_Simulation(described, targets, attention))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def simulated_targets(tokens: int) -> int:
    """How many of ``tokens`` are trained: all of them where the plan does not know."""
    now = _CURRENT.get()
    return tokens if now is None or now.targets is None else max(1, min(now.targets, tokens))


def simulated_device() -> Device | None:
    """The device that is planned for, inside `simulating`."""
    now = _CURRENT.get()
    return None if now is None else now.device


def simulated_attention() -> str:
    """The implementation of attention that a plan is for; "auto" leaves it to the table."""
    now = _CURRENT.get()
    return "auto" if now is None else now.attention


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
