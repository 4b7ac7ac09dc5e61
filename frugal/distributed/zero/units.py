"""ZeRO-3's partitioned parameters: cut, gathered, and counted. Used by all ranks at the same time."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

from frugal.errors import UnsupportedError


def deepspeed() -> Any:
    """The package, imported when a run needs it: it is optional, and slow to import."""
    import deepspeed as package

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return package


def partition(parameters: list[nn.Parameter], config: dict[str, Any], offload: bool) -> None:
    """Cut parameters that are whole, the same on every rank, into one part a rank (ZeRO-3). Bytes are moved as bytes.

    Each becomes an empty tensor whose part is its ``ds_tensor``.
    """
    todo = [parameter for parameter in parameters if not hasattr(parameter, "ds_id")]
    if not todo:
        return
    package = deepspeed()
    package.init_distributed(verbose=False)
    holder = nn.Module()
    for index, parameter in enumerate(todo):
        holder.register_parameter(str(index), parameter)
    package.zero.Init(
        module=holder,
        config_dict_or_path=config,
        dtype=torch.float32,  # of nothing that is converted here
        remote_device="cpu" if offload else None,
    )


def whole(parameter: nn.Parameter, *, modifier_rank: int | None = None) -> contextlib.AbstractContextManager[Any]:
    """A parameter gathered, on every rank. With ``modifier_rank`` that rank's changes are kept."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    gathered: contextlib.AbstractContextManager[Any] = deepspeed().zero.GatheredParameters(
        [parameter], modifier_rank=modifier_rank
    )
    return gathered


def gather_around(layer: nn.Module) -> list[Any]:
    """Hooks that gather a partitioned layer around each forward pass (without a backward one)."""
    parameters: list[Any] = [parameter for parameter in layer.parameters() if hasattr(parameter, "ds_id")]

    def before(*_: Any) -> None:
        parameters[0].all_gather(parameters)

    def after(*_: Any) -> None:
        parameters[0].partition(parameters)

    if not parameters:
        return []
    return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after, always_call=True)]


def make_unit(name: str, layer: nn.Module) -> None:
    """Make a layer a unit of ZeRO-3: its parameters are gathered, and its gradients reduced, together.

    DeepSpeed reduces a unit's gradients when the gradient of its input is there. Where the input wants none (the first
    layer over a frozen embedding) that moment is before the layer's backward pass, and its gradients would be lost:
    so the input of every unit wants one.
    """
    from deepspeed.utils import set_z3_leaf_module

    def want_gradient(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled():
            return None
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise UnsupportedError(
                f"ZeRO-3 cannot train {name}: {type(module).__name__} takes no hidden states as its first argument. "
                "Use distributed.strategy: fsdp2 or zero2."
            )
        return None if args[0].requires_grad else (args[0].detach().requires_grad_(), *args[1:])

    layer.register_forward_pre_hook(want_gradient)
    set_z3_leaf_module(layer, True)


def refuse_whole(module: nn.Module, world_size: int) -> None:
    """Raise AssertionError unless this rank holds about 1/N of every parameter's bytes, 4-bit ones too."""
    parameter: Any
    for name, parameter in module.named_parameters():
        part = getattr(parameter, "ds_tensor", None)
        if part is None or part.numel() > -(-parameter.ds_numel // world_size) or part.dtype != parameter.dtype:
            raise AssertionError(
                f"{name} is not partitioned: {parameter.ds_summary() if part is not None else 'whole'}"
            )


def local_bytes(module: nn.Module) -> dict[str, int]:
    """Bytes of parameters as this rank stores them between steps: `frozen` and `trained` ones, in the model alone."""
    found = {"frozen": 0, "trained": 0}
    parameter: Any
    for parameter in module.parameters():
        stored = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
        found["trained" if parameter.requires_grad else "frozen"] += stored.nbytes + (
            parameter.data.nbytes if stored is not parameter else 0
        )
    return found


def my_span(parameter: Any) -> tuple[int, int]:
    """(first element, number of elements) of a ZeRO-3 parameter that lie on this rank, padding left out."""
    size = parameter.ds_tensor.numel()
    first = size * parameter.ds_zero_partition_rank
    return first, max(0, min(size, parameter.ds_numel - first))


def my_part(parameter: Any, value: Tensor) -> Tensor:
    """What this rank keeps of a whole tensor under ZeRO-3, padded with zeros."""
    first, count = my_span(parameter)
    part = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)
    part[:count] = value.flatten()[first : first + count].to("cpu", torch.float32)
    return part
