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

_SPARSE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _SPARSE,
    "qwen2_moe": {**_SPARSE, "shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 6},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
                    "global_head_dim": 12, "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 16,
                    "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
                    "sliding_window": 6},
    "qwen3_next": {**_SPARSE, "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
                   "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model of one of `FAMILIES` (or another transformers model type, with ``changes``)."""
    own = FAMILIES.get(family) or MOE_FAMILIES.get(family, {})
    return AutoConfig.for_model(family, **{**_COMMON, **own, **changes})


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
