"""A tiny LoRA model and its gradients, for the tests of checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.conftest import make_llama

POLICIES = ("recompute", "offload", "disk", "auto")


def lora_model(*, dropout: float = 0.0, use_cache: bool = True, attention_dropout: float = 0.0, **changes: Any) -> Any:
    base = make_llama(use_cache=use_cache, attention_dropout=attention_dropout, **changes)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear")
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # B starts at zero, which would hide A's gradients
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def batch(tokens: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * tokens).view(2, tokens) % 290 + 5
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def gradients(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    model(**inputs, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
        assert one[name].abs().max() > 0, name
