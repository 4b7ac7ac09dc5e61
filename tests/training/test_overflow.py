"""float16 that overflows is found by one row before training, and named; a first loss blames no learning rate (B6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frugal.errors import FrugalError, UnsupportedError
from frugal.training.loop import micro_batch, train_loop
from frugal.training.overflow import refuse_overflow
from frugal.training.setup import Hooks, LoopState, TrainSetup
from frugal.training.signals import StopRequest
from tests.support import training as toy

DOWN, HEAD = "model.layers.1.mlp.down_proj.base_layer", "lm_head"


def job(overflows: str | None, dtype: torch.dtype = torch.float16, **train: Any) -> TrainSetup:
    """A job in ``dtype`` whose module of that name multiplies by 1e6, together with the norm before it."""
    model = toy.tiny_model()
    if overflows is not None:
        with torch.no_grad():
            norm = "model.norm" if overflows == HEAD else "model.layers.1.post_attention_layernorm"
            for name in (overflows, norm):
                model.get_submodule(f"base_model.model.{name}").weight.mul_(1e3)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return toy.make_job(model, toy.rows([3] * 4), **train)


def check(of: TrainSetup) -> None:
    refuse_overflow(of.strategy, of.wrapped, of.module.model, micro_batch(of, [0], 0))


@pytest.mark.parametrize(
    ("module", "told"), [(DOWN, r"model\.layers\.1\.mlp\S* gives"), (HEAD, r"the head \(its logits\)")]
)
def test_the_module_is_named(module: str, told: str) -> None:
    found = job(module)
    found.wrapped.train()
    with pytest.raises(UnsupportedError, match=told) as caught:
        check(found)
    assert "model.dtype: float32" in str(caught.value)
    assert found.wrapped.training
    assert not any(one._forward_hooks for one in found.module.modules())


def test_what_fits_float16_is_trained() -> None:
    check(job(None))


def test_the_same_base_in_float32() -> None:
    check(job(DOWN, torch.float32))


@pytest.mark.parametrize("updated", [False, True])
def test_a_first_loss_that_is_not_finite_is_no_matter_of_the_learning_rate(updated: bool) -> None:
    found = job(HEAD)
    if updated:
        found.optimizer_step(loss_scaling=False).put_state()
    hooks = Hooks(lambda record: None, lambda state: None, StopRequest(print))
    with pytest.raises(FrugalError, match=r"the loss is (nan|inf)") as caught:
        train_loop(found, hooks, LoopState())
    assert ("Lower train.learning_rate" in str(caught.value)) == updated
    assert ("Nothing was updated yet" in str(caught.value)) == (not updated)
