"""Whether a prepared run is what was asked for: refuses set-ups that train on silently, but not as asked.

Each was met with other tools: 4-bit weights left whole on every rank, no wrapper and so no reduced gradients, an
optimizer that steps tensors the model no longer uses, storage that a mixed-precision policy may rewrite, clipping at a
default that nobody chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from frugal.codecs.base import encoded_parts
from frugal.distributed.strategy import KINDS, Strategy
from frugal.errors import UnsupportedError

_SHARD_OPTIMIZERS = ("torch.optim.", "frugal.")
"""Packages whose optimizers step DTensors or local shards; bitsandbytes' refuse them."""


@dataclass
class Shares:
    """Bytes of the model's parameters between steps, by kind (`KINDS`)."""

    local: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """What this rank holds."""
    whole: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """What all of it is."""


@dataclass(frozen=True)
class _Part:
    name: str
    kind: str
    local_bytes: int
    whole_bytes: int
    most: int
    """Bytes of an even share, rounded up to whole rows."""


def shares(strategy: Strategy, module: nn.Module) -> Shares:
    """Count the bytes of ``module``'s parameters."""
    found = Shares()
    for part in _parts(strategy, module):
        found.local[part.kind] += part.local_bytes
        found.whole[part.kind] += part.whole_bytes
    return found


def preflight(
    strategy: Strategy, wrapped: nn.Module, module: nn.Module, optimizer: Optimizer, *, max_grad_norm: float
) -> Shares:
    """Check what `Strategy.prepare` returned (``wrapped``, ``optimizer``) for ``module``; gives the bytes it found.

    Raises UnsupportedError naming the first thing that is not as asked. Every rank sees the same.
    """
    _storage(module)
    if strategy.world_size > 1:
        _wrapped(strategy, wrapped)
        _cut(strategy, module)
    strategy.check_clipping(max_grad_norm)
    if not strategy.engine_steps:
        _optimizer(strategy, module, optimizer)
    return shares(strategy, module)


def _storage(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        for kind in (kind for stored in encoded_parts(layer).values() for kind in stored):
            stored = getattr(layer, kind)
            if stored is not None and stored.is_floating_point():
                raise UnsupportedError(
                    f"{name}.{kind} holds 4-bit storage as {stored.dtype}: a cast would rewrite its bytes. Load the "
                    "base with frugal, which stores them as integers."
                )


def _wrapped(strategy: Strategy, wrapped: nn.Module) -> None:
    if not strategy.is_wrapped(wrapped):
        raise UnsupportedError(
            f"{strategy.world_size} processes were to train with {strategy.name}, but the module is a "
            f"{type(wrapped).__name__}: gradients would not be reduced, and each process would train alone."
        )


def _cut(strategy: Strategy, module: nn.Module) -> None:
    for part in _parts(strategy, module):
        if part.kind in strategy.sharded_kinds and part.local_bytes > part.most:
            raise UnsupportedError(
                f"{part.name} was to be cut over {strategy.world_size} processes, but this one holds "
                f"{part.local_bytes} of its {part.whole_bytes} bytes. Please report this, with the base's name; "
                "distributed.strategy: ddp works where the base fits each GPU."
            )


def _optimizer(strategy: Strategy, module: nn.Module, optimizer: Optimizer) -> None:
    trained = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained.keys() != stepped:
        missing = [name for key, name in trained.items() if key not in stepped]
        raise UnsupportedError(
            f"the optimizer steps {len(stepped)} tensors, the model trains {len(trained)}"
            + (f"; {missing[0]} is not among them" if missing else "")
            + ". It must be built after the model is sharded, over the parameters it then has."
        )
    where = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if strategy.sharded_kinds and not where.startswith(_SHARD_OPTIMIZERS):
        raise UnsupportedError(f"{where} cannot step shards. Write train.optim: adamw or adamw_8bit.")


def _parts(strategy: Strategy, module: nn.Module) -> Iterator[_Part]:
    packed = {
        id(getattr(layer, part))
        for layer in module.modules()
        for stored in encoded_parts(layer).values()
        for part in stored
    }
    for name, parameter in module.named_parameters():
        held, numel, most = strategy.shard_sizes(parameter)
        kind = "trained" if parameter.requires_grad else "nf4" if id(parameter) in packed else "base"
        size = parameter.element_size()
        yield _Part(name, kind, held * size, numel * size, most * size)
