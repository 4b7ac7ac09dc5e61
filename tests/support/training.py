"""Small pieces that several tests of training share: a tiny LoRA model, rows, and a job for the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from frugal.config import TrainSection
from frugal.data import TokenDataset
from frugal.distributed.strategy import replicated
from frugal.models.attention import use_attention
from frugal.objectives import LossModule, make_objective
from frugal.training.oom_fallback import MemorySettings
from frugal.training.optim import build_optimizer, trainable
from frugal.training.schedule import StepOrder, lr_lambda, make_plan
from frugal.training.setup import TrainSetup

VOCAB = 97


def tiny_model(seed: int = 0, *, dropout: float = 0.0, attention: str = "sdpa", **changes: Any) -> torch.nn.Module:
    """A PEFT Llama with 2 layers in fp32; B is not zero, so that all gradients are."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    base = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}, attn_implementation=attention))
    base.config.use_cache = False
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def rows(targets: Sequence[int], *, seed: int = 0, length: int = 12) -> TokenDataset:
    """Rows with exactly ``targets[i]`` targets at their end, of different lengths."""
    random = np.random.default_rng(seed)
    ids, trained = [], []
    for index, count in enumerate(targets):
        size = length + index % 3
        ids.append(random.integers(3, VOCAB, size).astype(np.int32))
        trained.append(np.arange(size) >= size - count)
    return TokenDataset.from_documents(ids, trained, list(range(len(targets))))


def make_job(
    model: torch.nn.Module,
    data: TokenDataset,
    *,
    eval_rows: TokenDataset | None = None,
    flat: bool = False,
    **train: Any,
) -> TrainSetup:
    """A job on the CPU; ``train`` are keys of the train section."""
    if flat:
        assert use_attention(model.get_base_model()).value == "frugal"
    section = TrainSection.model_validate({"group_by_length": False, **train})
    module = LossModule(model, make_objective(flat=flat, label_smoothing=section.label_smoothing))
    strategy = replicated(torch.device("cpu"))
    wrapped, optimizer = strategy.prepare(module, lambda: build_optimizer(trainable(model), section))
    plan = make_plan(section, rows=len(data), world_size=strategy.world_size)
    return TrainSetup(
        module=module,
        wrapped=wrapped,
        strategy=strategy,
        optimizer=optimizer,
        plan=plan,
        order=StepOrder(data.lengths, plan, seed=section.seed, group_by_length=section.group_by_length),
        train=section,
        rows=data,
        eval_rows=eval_rows,
        device=torch.device("cpu"),
        lr_lambda=lr_lambda(section, plan),
        memory=MemorySettings(module, section.per_device_train_batch_size, section.per_device_eval_batch_size),
    )
