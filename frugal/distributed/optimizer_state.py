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

Tensors = dict[str, torch.Tensor]
Convert = Callable[[nn.Parameter, Tensors], Tensors]
"""(parameter, its state's tensors by key) -> the same as whole tensors, or as the part that this rank keeps."""


@dataclass
class OptimizerState:
    """An optimizer's state, ready for a safetensors file and its metadata."""

    tensors: dict[str, torch.Tensor]
    """`<parameter name>|<state key>` -> tensor, with the dtype and shape that the optimizer uses."""
    meta: dict[str, Any]
    """Kind of optimizer, parameters with their shapes, numbers, and which tensors live on the CPU by design."""


def optimizer_state(optimizer: Optimizer, whole: Convert | None = None) -> OptimizerState:
    """The state of all parameters; without ``whole`` tensors by reference (nothing is copied)."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    host: list[str] = []
    shapes: dict[str, list[int]] = {}
    for name, parameter in named_parameters(optimizer).items():
        shapes[name] = list(parameter.shape)
        found: Tensors = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            label = f"{name}|{key}"
            if isinstance(value, torch.Tensor):
                if value.device != parameter.device:
                    host.append(label)
                found[key] = value.detach()
            elif value is None or isinstance(value, (int, float, bool)):
                numbers[label] = value
            else:
                raise TypeError(f"optimizer state {label} is a {type(value).__name__}, which cannot be saved")
        if found and whole is not None:
            found = whole(parameter, found)
        tensors.update({f"{name}|{key}": value for key, value in found.items()})
    meta = {"optimizer": type(optimizer).__name__, "parameters": shapes, "numbers": numbers, "on_host": host}
    return OptimizerState(tensors, meta)


def load_optimizer_state(optimizer: Optimizer, saved: OptimizerState, where: str, part: Convert | None = None) -> None:
    """Put saved state back bit for bit: dtypes and shapes as saved, tensors on their parameter's device.

    ``part`` cuts out what this rank keeps. Raises CheckpointError, naming ``where``, for state of another optimizer or
    of other parameters.
    """
    named = named_parameters(optimizer)
    refuse_other_state(type(optimizer).__name__, {name: list(p.shape) for name, p in named.items()}, saved, where)
    on_host = set(saved.meta.get("on_host", []))
    tensors: dict[str, Tensors] = {name: {} for name in named}
    for label, tensor in saved.tensors.items():
        name, _, key = label.rpartition("|")
        if name not in tensors:
            raise CheckpointError(f"{where} holds state for the unknown parameter {name!r}")
        tensors[name][key] = tensor
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        found = tensors[name]
        if found and part is not None:
            found = part(parameter, found)
        cpu = torch.device("cpu")
        state[name] = {k: t.to(cpu if f"{name}|{k}" in on_host else parameter.device) for k, t in found.items()}
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
