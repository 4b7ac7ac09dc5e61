"""Whether a prepared run is what was asked for: refuses the set-ups that train on without a word, but not as said.

Each was met with other tools: 4-bit weights left whole on every rank, no wrapper and so no reduced gradients, an
optimizer that steps tensors the model no longer uses, storage that a mixed-precision policy may rewrite, clipping at a
default that nobody chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from frugal.codecs.base import encoded_parts
from frugal.distributed.fsdp2 import FullyShard
from frugal.distributed.strategy import Strategy
from frugal.distributed.tensors import local
from frugal.distributed.zero.engine import Zero
from frugal.errors import UnsupportedError

KINDS = ("nf4", "base", "trained")
_SHARD_OPTIMIZERS = ("torch.optim.", "frugal.")
"""Packages whose optimizers step DTensors or local shards; bitsandbytes' refuse them."""


@dataclass
class Shares:
    """Bytes of the model's parameters between steps, by kind: 4-bit storage, other frozen ones, trained ones."""

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


def shares(module: nn.Module) -> Shares:
    """Count the bytes of ``module``'s parameters, whatever shards them."""
    found = Shares()
    for part in _parts(module, 1):
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
    if isinstance(strategy, Zero):
        clipping = float(strategy.engine.gradient_clipping())
        if clipping != max_grad_norm:
            raise UnsupportedError(
                f"DeepSpeed clips gradients at {clipping}, and train.max_grad_norm is {max_grad_norm}. Set "
                f"gradient_clipping to {max_grad_norm}, or take it out of DeepSpeed's configuration."
            )
    else:
        _optimizer(strategy, module, optimizer)
    return shares(module)


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
    kinds: dict[str, bool] = {
        "ddp": isinstance(wrapped, DistributedDataParallel),
        "fsdp2": isinstance(wrapped, FSDPModule),
    }
    right = wrapped is strategy.engine if isinstance(strategy, Zero) else kinds.get(strategy.name, False)
    if not right:
        raise UnsupportedError(
            f"{strategy.world_size} processes were to train with {strategy.name}, but the module is a "
            f"{type(wrapped).__name__}: gradients would not be reduced, and each process would train alone."
        )


def _cut(strategy: Strategy, module: nn.Module) -> None:
    if isinstance(strategy, FullyShard):
        kinds = set(KINDS) if strategy.shard_base else {"trained"}
    elif isinstance(strategy, Zero) and strategy.settings.stage == 3:
        kinds = set(KINDS)
    else:
        return
    world = strategy.world_size
    for part in _parts(module, world):
        if part.kind in kinds and part.local_bytes > part.most:
            raise UnsupportedError(
                f"{part.name} was to be cut over {world} processes, but this one holds {part.local_bytes} of its "
                f"{part.whole_bytes} bytes. Please report this, with the base's name; distributed.strategy: ddp works "
                "where the base fits each GPU."
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
    if isinstance(strategy, FullyShard) and not where.startswith(_SHARD_OPTIMIZERS):
        raise UnsupportedError(f"{where} cannot step shards. Write train.optim: adamw or adamw_8bit.")


def _parts(module: nn.Module, world: int) -> Iterator[_Part]:
    packed = {
        id(getattr(layer, part))
        for layer in module.modules()
        for stored in encoded_parts(layer).values()
        for part in stored
    }
    parameter: Any
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):  # ZeRO-3: flat parts, without rows
            numel, held = parameter.ds_numel, parameter.ds_tensor.numel() + parameter.data.numel()
            most = -(-numel // world)
        else:
            numel, held = parameter.numel(), local(parameter).numel()
            # a dimension that does not divide is cut in chunks of ceil(size / world) rows
            most = max((-(-extent // world) * (numel // extent) for extent in parameter.shape if extent), default=numel)
        kind = "trained" if parameter.requires_grad else "nf4" if id(parameter) in packed else "base"
        size = parameter.element_size()
        yield _Part(name, kind, held * size, numel * size, most * size)
