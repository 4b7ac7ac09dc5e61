"""Optimizers over adapter parameters, and their state as named tensors.

State is keyed by parameter name and loaded without `Optimizer.load_state_dict`: that one casts floating state to the
parameter's dtype, which ruins 8-bit state, and matches parameters by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from frugal.config import TrainSection
from frugal.errors import CheckpointError
from frugal.train.optim8bit import AdamW8bit

_LORA_B = ("lora_B.", "lora_embedding_B.")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def build_optimizer(parameters: dict[str, nn.Parameter], train: TrainSection) -> Optimizer:
    """AdamW or 8-bit AdamW over named parameters.

    Weight decay goes on matrices only, not on vectors (biases, norms, DoRA magnitudes). With `loraplus_lr_ratio` the
    B matrices get that multiple of the learning rate (LoRA+, Hayou et al. 2024). Every group keeps `names`, its
    parameters' names, and `initial_lr`, which the schedule multiplies.
    """
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        decayed = parameter.ndim >= 2
        faster = train.loraplus_lr_ratio is not None and any(part in name for part in _LORA_B)
        rate = train.learning_rate * (train.loraplus_lr_ratio or 1.0) if faster else train.learning_rate
        group = groups.setdefault(
            (decayed, faster),
            {
                "params": [],
                "names": [],
                "lr": rate,
                "initial_lr": rate,
                "weight_decay": train.weight_decay if decayed else 0.0,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    betas = (train.adam_beta1, train.adam_beta2)
    chosen = list(groups.values())
    if train.optim == "adamw_8bit":
        return AdamW8bit(chosen, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon)
    on_cuda = all(parameter.is_cuda for parameter in parameters.values())
    return torch.optim.AdamW(
        chosen, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon, fused=True if on_cuda else None
    )


def set_rate(optimizer: Optimizer, factor: float) -> float:
    """Set every group's learning rate to factor x initial_lr; returns that of the group with the smallest one."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return float(min(group["lr"] for group in optimizer.param_groups))


@dataclass
class OptimizerState:
    """An optimizer's state, ready for a safetensors file and its metadata."""

    tensors: dict[str, torch.Tensor]
    """`<parameter name>|<state key>` -> tensor, with the dtype and shape that the optimizer uses."""
    meta: dict[str, Any]
    """Kind of optimizer, parameters with their shapes, numbers, and which tensors live on the CPU by design."""


def optimizer_state(optimizer: Optimizer) -> OptimizerState:
    """The state of all parameters, tensors by reference (nothing is copied)."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    host: list[str] = []
    shapes: dict[str, list[int]] = {}
    for name, parameter in _named(optimizer).items():
        shapes[name] = list(parameter.shape)
        for key, value in optimizer.state.get(parameter, {}).items():
            label = f"{name}|{key}"
            if isinstance(value, torch.Tensor):
                tensors[label] = value.detach()
                if value.device != parameter.device:
                    host.append(label)
            elif value is None or isinstance(value, (int, float, bool)):
                numbers[label] = value
            else:
                raise TypeError(f"optimizer state {label} is a {type(value).__name__}, which cannot be saved")
    meta = {"optimizer": type(optimizer).__name__, "parameters": shapes, "numbers": numbers, "on_host": host}
    return OptimizerState(tensors, meta)


def load_optimizer_state(optimizer: Optimizer, saved: OptimizerState, where: str) -> None:
    """Put saved state back bit for bit: dtypes and shapes as saved, tensors on their parameter's device.

    Raises CheckpointError, naming ``where``, for state of another optimizer or of other parameters.
    """
    kind = type(optimizer).__name__
    if saved.meta.get("optimizer") != kind:
        raise CheckpointError(
            f"{where} holds the state of {saved.meta.get('optimizer')!r}, this run uses {kind!r}. "
            "Set train.optim back, or start a new run in another output.dir."
        )
    named = _named(optimizer)
    shapes: dict[str, list[int]] = saved.meta.get("parameters", {})
    _refuse_other_parameters(named, shapes, where)
    on_host = set(saved.meta.get("on_host", []))
    state: dict[str, dict[str, Any]] = {name: {} for name in named}
    for label, tensor in saved.tensors.items():
        name, _, key = label.rpartition("|")
        if name not in state:
            raise CheckpointError(f"{where} holds state for the unknown parameter {name!r}")
        device = torch.device("cpu") if label in on_host else named[name].device
        state[name][key] = tensor.to(device)
    for label, number in saved.meta.get("numbers", {}).items():
        name, _, key = label.rpartition("|")
        state[name][key] = number
    for name, parameter in named.items():
        if state[name]:
            optimizer.state[parameter] = state[name]


def _named(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }


def _refuse_other_parameters(named: dict[str, nn.Parameter], shapes: dict[str, list[int]], where: str) -> None:
    missing = [name for name in named if name not in shapes]
    foreign = [name for name in shapes if name not in named]
    other = [name for name in named if name in shapes and list(named[name].shape) != shapes[name]]
    if not (missing or foreign or other):
        return
    lines = [f"{where} is of other parameters ({len(shapes)} saved, {len(named)} in this run):"]
    lines += [f"  not in the file: {name}" for name in missing[:3]]
    lines += [f"  not in this run: {name}" for name in foreign[:3]]
    lines += [f"  {name}: shape {shapes[name]} saved, {list(named[name].shape)} in this run" for name in other[:3]]
    raise CheckpointError("\n".join([*lines, "Set the lora section back to what it was, or start a new run."]))
