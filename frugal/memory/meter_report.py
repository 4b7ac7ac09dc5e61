"""What the live-bytes meter reports, and which tensors of a model and an optimizer belong to which category."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from frugal.units import gib

WEIGHTS = "weights"
QUANT_STATE = "quant state"
ADAPTERS = "adapters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
SAVED = "saved activations"
TEMPORARIES = "temporaries"
INPUTS = "inputs"
"""Tensors that existed before the region and that nobody registered (a batch, a table of constants)."""

CATEGORIES = (WEIGHTS, QUANT_STATE, ADAPTERS, GRADIENTS, OPTIMIZER, SAVED, TEMPORARIES, INPUTS)


@dataclass(frozen=True)
class Site:
    """Live bytes at the peak that came from one operation of one module."""

    bytes: int
    tensors: int
    category: str
    module: str
    """Dotted name of the innermost module, layer numbers as ``*`` so that equal layers add up; "" outside modules."""
    op: str
    """The operation, preceded by the autograd node in backward: ``MulBackward0 > aten.mul``."""


@dataclass(frozen=True)
class MeterReport:
    """What a region held at its peak."""

    peak_bytes: int
    start_bytes: int
    """Bytes that were registered as existing before the region."""
    end_bytes: int
    """Bytes still live at the end of the region."""
    by_category: dict[str, int]
    """Bytes at the peak for each of ``CATEGORIES`` that is not empty; they add up to peak_bytes."""
    sites: list[Site]
    """Largest first; empty where only the allocator's statistics are known."""
    peak_op: str
    """The allocation at which the peak stood."""
    source: str
    """``dispatch`` (every storage followed) or ``allocator`` (CUDA statistics)."""

    def to_dict(self) -> dict[str, Any]:
        """JSON form, for manifests and benchmark files."""
        return dataclasses.asdict(self)

    def table(self, sites: int = 12) -> str:
        """A text table: categories, then the largest allocation sites."""
        lines = [f"peak {gib(self.peak_bytes)} at {self.peak_op or 'unknown'}"]
        lines += [f"  {name:<18} {gib(count):>10}" for name, count in self.by_category.items()]
        if self.sites:
            lines.append("largest at the peak:")
        for site in self.sites[:sites]:
            where = site.module or "(no module)"
            lines.append(f"  {gib(site.bytes):>10} {site.tensors:>5} x  {site.category:<18} {where}: {site.op}")
        return "\n".join(lines)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in tree_iter(state) if isinstance(value, torch.Tensor))


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(category, tensor) of all that a model holds: parameters (trainable ones are adapters), buffers, and the
    quantisation state that hangs on parameters and modules (bitsandbytes' ``quant_state``, frugal's NF4 tensors)."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield (ADAPTERS if parameter.requires_grad else _frozen_kind(name)), parameter
            yield from ((QUANT_STATE, t) for t in _state_tensors(getattr(parameter, "quant_state", None)))
        for name, buffer in module.named_buffers(recurse=False):
            yield _frozen_kind(name), buffer
        for value in list(vars(module).values()):
            if type(value).__module__.partition(".")[0] in ("frugal", "bitsandbytes") and not isinstance(
                value, nn.Module
            ):
                yield from ((QUANT_STATE, t) for t in _state_tensors(value))


def _frozen_kind(name: str) -> str:
    scales = any(word in name for word in ("absmax", "code", "offset", "scale", "quant"))
    return QUANT_STATE if scales else WEIGHTS


def _state_tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and value is not None and not isinstance(value, nn.Module):
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        elif type(value).__module__.partition(".")[0] in ("frugal", "bitsandbytes"):
            slots = [getattr(value, s) for s in getattr(type(value), "__slots__", ()) if hasattr(value, s)]
            inner = [*vars(value).values(), *slots] if hasattr(value, "__dict__") else slots
        for item in inner:
            yield from _state_tensors(item, depth + 1)
