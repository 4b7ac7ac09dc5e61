"""Optimizers over adapter parameters. Their state as named tensors is in `frugal.distributed.optimizer_state`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from frugal.config import TrainSection
from frugal.distributed.optimizer_state import OptimizerState, load_optimizer_state, optimizer_state
from frugal.training.optim8bit import AdamW8bit

__all__ = [
    "OptimizerState",
    "build_optimizer",
    "load_optimizer_state",
    "optimizer_state",
    "set_lr",
    "trainable",
]

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


def set_lr(optimizer: Optimizer, factor: float) -> float:
    """Set every group's learning rate to factor x initial_lr; returns that of the group with the smallest one."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return float(min(group["lr"] for group in optimizer.param_groups))
