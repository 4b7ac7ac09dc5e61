"""An optimizer's state as named tensors: what a checkpoint holds, whole, whatever the number of processes.

State is keyed by parameter name and loaded without `Optimizer.load_state_dict`: that one casts floating state to the
parameter's dtype, which ruins 8-bit state, and matches parameters by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from frugal.errors import CheckpointError

Whole = Callable[[str, nn.Parameter, torch.Tensor], "torch.Tensor | None"]
"""(state key, its parameter, tensor as this rank has it) -> the whole tensor; None on ranks that do not write it."""
Part = Callable[[str, nn.Parameter, torch.Tensor], torch.Tensor]
"""(state key, its parameter, whole tensor) -> what this rank keeps of it."""


@dataclass
class OptimizerState:
    """An optimizer's state, ready for a safetensors file and its metadata."""

    tensors: dict[str, torch.Tensor]
    """`<parameter name>|<state key>` -> tensor, with the dtype and shape that the optimizer uses."""
    meta: dict[str, Any]
    """Kind of optimizer, parameters with their shapes, numbers, and which tensors live on the CPU by design."""


def optimizer_state(optimizer: Optimizer, whole: Whole | None = None) -> OptimizerState:
    """The state of all parameters; without ``whole`` tensors by reference (nothing is copied)."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    host: list[str] = []
    shapes: dict[str, list[int]] = {}
    for name, parameter in named_parameters(optimizer).items():
        shapes[name] = list(parameter.shape)
        for key, value in optimizer.state.get(parameter, {}).items():
            label = f"{name}|{key}"
            if isinstance(value, torch.Tensor):
                if value.device != parameter.device:
                    host.append(label)
                full = value.detach() if whole is None else whole(key, parameter, value.detach())
                if full is not None:
                    tensors[label] = full
            elif value is None or isinstance(value, (int, float, bool)):
                numbers[label] = value
            else:
                raise TypeError(f"optimizer state {label} is a {type(value).__name__}, which cannot be saved")
    meta = {"optimizer": type(optimizer).__name__, "parameters": shapes, "numbers": numbers, "on_host": host}
    return OptimizerState(tensors, meta)


def load_optimizer_state(optimizer: Optimizer, saved: OptimizerState, where: str, part: Part | None = None) -> None:
    """Put saved state back bit for bit: dtypes and shapes as saved, tensors on their parameter's device.

    ``part`` cuts out what this rank keeps. Raises CheckpointError, naming ``where``, for state of another optimizer or
    of other parameters.
    """
    named = named_parameters(optimizer)
    refuse_other_state(type(optimizer).__name__, {name: list(p.shape) for name, p in named.items()}, saved, where)
    on_host = set(saved.meta.get("on_host", []))
    state: dict[str, dict[str, Any]] = {name: {} for name in named}
    for label, tensor in saved.tensors.items():
        name, _, key = label.rpartition("|")
        if name not in state:
            raise CheckpointError(f"{where} holds state for the unknown parameter {name!r}")
        if part is not None:
            tensor = part(key, named[name], tensor)
        device = torch.device("cpu") if label in on_host else named[name].device
        state[name][key] = tensor.to(device)
    for label, number in saved.meta.get("numbers", {}).items():
        name, _, key = label.rpartition("|")
        state[name][key] = number
    for name, parameter in named.items():
        if state[name]:
            optimizer.state[parameter] = state[name]


def named_parameters(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Parameters by the `names` that `build_optimizer` keeps in each group."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }


def refuse_other_state(kind: str, here: Mapping[str, list[int]], saved: OptimizerState, where: str) -> None:
    """Raise CheckpointError unless ``saved`` is of an optimizer of this ``kind`` and of parameters of these shapes."""
    if saved.meta.get("optimizer") != kind:
        raise CheckpointError(
            f"{where} holds the state of {saved.meta.get('optimizer')!r}, this run uses {kind!r}. "
            "Set train.optim back, or start a new run in another output.dir."
        )
    shapes: dict[str, list[int]] = saved.meta.get("parameters", {})
    missing = [name for name in here if name not in shapes]
    foreign = [name for name in shapes if name not in here]
    other = [name for name in here if name in shapes and here[name] != shapes[name]]
    if not (missing or foreign or other):
        return
    lines = [f"{where} is of other parameters ({len(shapes)} saved, {len(here)} in this run):"]
    lines += [f"  not in the file: {name}" for name in missing[:3]]
    lines += [f"  not in this run: {name}" for name in foreign[:3]]
    lines += [f"  {name}: shape {shapes[name]} saved, {here[name]} in this run" for name in other[:3]]
    raise CheckpointError("\n".join([*lines, "Set the lora section back to what it was, or start a new run."]))
