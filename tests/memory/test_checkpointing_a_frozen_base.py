"""G03: activation checkpointing with a frozen base: the same gradients, no cache, nothing left changed."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from frugal.memory.checkpointing import apply_activation_checkpointing
from frugal.training.loop import train_loop
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from tests.support import training as toy


def train(policy: str, *, use_cache: bool, dropout: float, steps: int = 1) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Train ``steps`` steps; the model and the gradients of the last one."""
    model = toy.tiny_model(dropout=dropout)
    if steps > 1:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.zeros_(parameter)  # as PEFT starts
    model.get_base_model().config.use_cache = use_cache
    handle = apply_activation_checkpointing(model, policy)  # type: ignore[arg-type]
    job = toy.make_job(
        model,
        toy.rows([3, 5, 2, 6]),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        warmup_ratio=0.0,
    )
    gradients: dict[str, torch.Tensor] = {}
    original = job.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for group in job.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                gradients[name] = parameter.grad.clone()
        return original(*args, **kwargs)

    job.optimizer.step = step  # type: ignore[method-assign]
    torch.manual_seed(5)  # dropout
    train_loop(job, Hooks(lambda record: None, lambda state: None, StopRequest()), LoopState())
    handle.close()
    return model, gradients


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_the_same_in_all_combinations(dropout: float) -> None:
    _, expected = train("none", use_cache=False, dropout=dropout)
    assert all(gradient.any() for gradient in expected.values())
    for policy, use_cache in itertools.product(("none", "recompute", "offload", "disk"), (False, True)):
        model, found = train(policy, use_cache=use_cache, dropout=dropout)
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), (policy, use_cache, name)
        assert model.get_base_model().config.use_cache is use_cache
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
            assert parameter.requires_grad or parameter.grad is None


def test_every_b_is_trained_after_two_steps_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, _ = train("recompute", use_cache=True, dropout=0.0, steps=2)
    matrices = {name: parameter for name, parameter in model.named_parameters() if "lora_B" in name}
    assert len(matrices) == 14
    assert all(matrix.any() for matrix in matrices.values())
