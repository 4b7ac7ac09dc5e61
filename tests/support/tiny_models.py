"""Tiny random models of the families that frugal is proven with, from their own configurations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_COMMON: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0,
               "query_pre_attn_scalar": 12},
    "gemma3_text": {"sliding_window": 5, "num_hidden_layers": 6, "query_pre_attn_scalar": 12},
    "phi3": {"sliding_window": 7},
    "smollm3": {"num_hidden_layers": 4},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
                "residual_multiplier": 0.5},
    "olmo2": {},
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model of one of `FAMILIES` (or another transformers model type, with ``changes``)."""
    return AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **changes})


def tiny_model(family: str, *, seed: int = 0, attn_implementation: str | None = None, **changes: Any) -> Any:
    """A tiny random model in float32 and eval mode; norm weights are shaken off their initial value too."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.2 * noise)
    return model.eval()
