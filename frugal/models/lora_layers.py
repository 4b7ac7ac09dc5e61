"""What a linear layer is made of at this moment: base weight, bias and the active adapters, read from the modules.

Works on `torch.nn.Linear`, its 16-bit form `UpcastLinear`, encoded ones (`frugal.codecs`) and PEFT's LoRA layer over
any of them. Read at every call, because PEFT may switch, disable or merge adapters at any time. What the fused
operations cannot do is answered with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from frugal.codecs.base import EncodedModule
from frugal.codecs.dense import UpcastLinear
from frugal.model_structure import engine_hooks
from frugal.ops.weights import Weight


@dataclass(frozen=True)
class Adapter:
    """One active low-rank update: scale * dropout(x) A^T B^T with A [r, in], B [out, r]."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: float
    """Probability in force now: 0 in evaluation."""


@dataclass(frozen=True)
class LoraWeights:
    """y = x W^T + bias + sum of adapters."""

    weight: Weight
    bias: Tensor | None
    adapters: tuple[Adapter, ...]


def lora_weights(module: nn.Module, *, hooks_run: bool = False) -> LoraWeights | str:
    """The parts of a linear layer, or the reason why it has to be called as it is.

    ``hooks_run``: the caller is the module's own forward, so hooks on the module itself are served anyway.
    """
    if isinstance(module, ModulesToSaveWrapper):
        if module.disable_adapters or not module.active_adapters:
            return lora_weights(module.original_module)
        return lora_weights(module.modules_to_save[module.active_adapters[0]])
    if isinstance(module, LoraLinear):
        return _lora_parts(module, hooks_run)
    if not hooks_run and _hooked(module):
        return f"{type(module).__name__} has forward hooks"
    if isinstance(module, nn.Linear) and isinstance(module, EncodedModule):
        return LoraWeights(module.encoded("weight"), module.bias, ())
    if isinstance(module, nn.Linear) and own_class(module) in (nn.Linear, UpcastLinear):
        return LoraWeights(module.weight, module.bias, ())
    return f"{type(module).__module__}.{type(module).__name__} is no plain linear layer"


def is_unit(module: nn.Module) -> bool:
    """Whether torch's `fully_shard` was applied to this very module: its parameters are shards until gathered."""
    return callable(getattr(module, "unshard", None)) and callable(getattr(module, "reshard", None))


def own_class(module: nn.Module) -> type:
    """The module's class; `fully_shard` puts one of its own in front, with the former as second base."""
    return type(module).__bases__[1] if is_unit(module) else type(module)


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, a sharded module has its parameters whole (a collective), though its forward is not called.

    That of a unit of `fully_shard`, and that of a frozen module which an engine partitioned (`engine_hooks`); one that
    is trained must stay whole until its backward pass, which the engine sees to when the parameter is read.
    """
    unit: Any = module if is_unit(module) else None
    hooks = engine_hooks(module)
    with contextlib.nullcontext() if hooks is None else hooks.gathered():
        if unit is not None:
            unit.unshard()
        try:
            yield
        finally:
            if unit is not None:
                unit.reshard()


def whole_weight(module: nn.Module, device: torch.device) -> Tensor | None:
    """The frozen weight of a unit of `fully_shard`, gathered into one tensor on ``device`` (a collective).

    `gathered` does the same with torch's flat buffer beside the parameter for a moment: twice a head's bytes, at the
    place where a sharded step often has its peak. None where that way has to be taken: a trained weight, a bias, rows
    that do not divide, shards that rest elsewhere.
    """
    weight = getattr(module, "weight", None)
    if not is_unit(module) or not isinstance(weight, DTensor) or len(list(module.parameters())) != 1:
        return None
    even = weight.placements == (Shard(0),) and weight.shape[0] % weight.device_mesh.size() == 0
    if weight.requires_grad or not even or weight.to_local().device != device:
        return None
    with torch.no_grad():
        full: Tensor = DTensor.full_tensor(weight)
        return full.detach()


def _hooked(module: nn.Module) -> bool:
    # hooks of fully_shard, of an engine: they gather; who reads the parameters himself gathers them himself
    engine = engine_hooks(module)
    gathers = 1 if is_unit(module) else engine.count if engine is not None else 0
    return bool(
        len(module._forward_hooks) > gathers or len(module._forward_pre_hooks) > gathers or module._backward_hooks
    )


def _lora_parts(module: LoraLinear, hooks_run: bool) -> LoraWeights | str:
    base = lora_weights(module.base_layer)
    if isinstance(base, str):
        return base
    if module.merged:
        return "adapters are merged into the base" if module.disable_adapters else base
    if module.disable_adapters:
        return base
    if not hooks_run and _hooked(module):
        return "the LoRA layer has forward hooks"
    if module.fan_in_fan_out:
        return "the weight is stored transposed (fan_in_fan_out)"
    found: list[Adapter] = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if name in module.lora_variant:
            variant = type(module.lora_variant[name]).__name__
            return f"adapter {name!r} is no plain LoRA ({variant}): left to PEFT"
        if module.lora_bias.get(name):
            return f"adapter {name!r} has a bias: left to PEFT"
        a, b, drop = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        # Evaluation may wrap A or B (hooks of a hub kernel, a quantised adapter): anything but nn.Linear is PEFT's.
        if type(a) is not nn.Linear or type(b) is not nn.Linear:
            return f"adapter {name!r} has {type(a).__name__} and {type(b).__name__} matrices: left to PEFT"
        if _hooked(a) or _hooked(b):
            return f"adapter {name!r} has hooks on its matrices"
        probability = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
        found.append(Adapter(a.weight, b.weight, float(module.scaling[name]), float(probability)))
    return LoraWeights(base.weight, base.bias, tuple(found))


def one_adapter(adapters: tuple[Adapter, ...]) -> tuple[Tensor, Tensor, float] | None:
    """Several adapters without dropout as one: A's stacked, B's side by side with their scale inside."""
    if not adapters:
        return None
    if len(adapters) == 1:
        return adapters[0].a, adapters[0].b, adapters[0].scale
    a = torch.cat([adapter.a for adapter in adapters], dim=0)
    b = torch.cat([adapter.b * adapter.scale for adapter in adapters], dim=1)
    return a, b, 1.0
