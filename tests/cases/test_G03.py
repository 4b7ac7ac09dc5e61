"""G03: gradient checkpointing with a frozen base must not lose gradients, change them, or meet a growing cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from frugal.memory import apply_activation_checkpointing
from tests.conftest import make_llama
from tests.memory.tools import POLICIES, assert_same, batch, gradients, lora_model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("use_cache", [True, False])
def test_gradients_are_equal_in_all_combinations(
    policy: Any, dropout: float, use_cache: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora_model(dropout=dropout, attention_dropout=dropout, use_cache=use_cache)
    inputs = batch()
    expected = gradients(model, inputs)
    handle = apply_activation_checkpointing(model, policy, scratch_dir=tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # the later ones leave out what nobody reads, and reuse buffers
            assert_same(gradients(model, inputs, use_cache=False), expected)
            assert_same(gradients(model, inputs), expected)
    assert len(caplog.records) <= 1  # transformers says once that the cache is off, not in every step
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)
    assert model.config.use_cache is use_cache
    handle.close()
    handle.close()
    assert_same(gradients(model, inputs), expected)
    assert "_gradient_checkpointing_func" not in vars(model.base_model.model.model.layers[0])
    model.base_model.model.config.save_pretrained(tmp_path)
    assert f'"use_cache": {str(use_cache).lower()}' in (tmp_path / "config.json").read_text()


def test_two_steps_move_every_b_matrix_and_nothing_frozen(tmp_path: Path) -> None:
    base = make_llama()
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).train()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    apply_activation_checkpointing(model, "disk", scratch_dir=tmp_path)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            assert parameter.abs().max() > 0, name
        elif name in frozen:
            assert torch.equal(parameter, frozen[name])
