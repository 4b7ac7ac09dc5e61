"""Parameter groups, and optimizer state as named tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from frugal.config import TrainSection
from frugal.errors import CheckpointError
from frugal.tensor_files import read_tensors, write_tensors
from frugal.training.optim import (
    OptimizerState,
    build_optimizer,
    load_optimizer_state,
    optimizer_state,
    set_lr,
)


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    shapes = {"q.lora_A.default.weight": (8, 600), "q.lora_B.default.weight": (600, 8), "q.magnitude": (600,)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def test_groups() -> None:
    named = parameters()
    optimizer = build_optimizer(named, TrainSection(weight_decay=0.1, loraplus_lr_ratio=16, learning_rate=1e-4))
    found = {name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["names"]}
    assert found == {
        "q.lora_A.default.weight": (1e-4, 0.1),
        "q.lora_B.default.weight": (1.6e-3, 0.1),
        "q.magnitude": (1e-4, 0.0),
    }
    assert set_lr(optimizer, 0.5) == 0.5e-4
    assert {group["lr"] for group in optimizer.param_groups} == {0.5e-4, 0.8e-3}
    set_lr(optimizer, 1.0)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-4, 1.6e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_state_travels_bit_for_bit(tmp_path: Path, optim: str, dtype: torch.dtype) -> None:
    section = TrainSection(optim=optim, learning_rate=1e-2)
    named = parameters(dtype=dtype)
    optimizer = build_optimizer(named, section)
    step(optimizer, named, 4, seed=1)
    saved = optimizer_state(optimizer)
    write_tensors(tmp_path / "o.safetensors", saved.tensors, saved.meta)

    other = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    resumed = build_optimizer(other, section)
    load_optimizer_state(resumed, OptimizerState(*read_tensors(tmp_path / "o.safetensors")), "o.safetensors")
    again = optimizer_state(resumed)
    assert again.meta == saved.meta
    assert again.tensors.keys() == saved.tensors.keys()
    for label, tensor in saved.tensors.items():
        assert again.tensors[label].dtype == tensor.dtype
        assert torch.equal(again.tensors[label], tensor)
    step(optimizer, named, 4, seed=2)
    step(resumed, other, 4, seed=2)
    for name in named:
        assert torch.equal(named[name], other[name])


def test_other_optimizer_and_other_parameters_are_refused_by_name() -> None:
    named = parameters()
    optimizer = build_optimizer(named, TrainSection())
    step(optimizer, named, 1, seed=0)
    saved = optimizer_state(optimizer)
    with pytest.raises(CheckpointError, match=r"x holds the state of 'AdamW', this run uses 'AdamW8bit'"):
        load_optimizer_state(build_optimizer(named, TrainSection(optim="adamw_8bit")), saved, "x")
    fewer = {name: named[name] for name in list(named)[:2]}
    with pytest.raises(CheckpointError, match=r"not in this run: q\.magnitude"):
        load_optimizer_state(build_optimizer(fewer, TrainSection()), saved, "x")
    more = {**named, "k.lora_A.default.weight": nn.Parameter(torch.zeros(2, 2))}
    with pytest.raises(CheckpointError, match=r"not in the file: k\.lora_A"):
        load_optimizer_state(build_optimizer(more, TrainSection()), saved, "x")
    other = {**named, "q.magnitude": nn.Parameter(torch.zeros(5))}
    with pytest.raises(CheckpointError, match=r"shape \[600\] saved, \[5\] in this run"):
        load_optimizer_state(build_optimizer(other, TrainSection()), saved, "x")
