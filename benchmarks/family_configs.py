"""Tiny configurations of model families: what `benchmarks/families.py` builds, with random weights.

Windows, chunks and original lengths are shorter than the rows, so that a mistake at their borders shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row: a transformers model type, what of `COMMON` is changed, and the class of a model with more than text."""

    model_type: str
    changes: dict[str, Any]
    text: dict[str, Any] | None = None
    """Changes of the text part, for a model that has more parts."""
    model_class: str | None = None
    """A class of transformers; None: what AutoModelForCausalLM makes of it."""

    def config(self) -> PretrainedConfig:
        """The configuration, its dropout switched off: random steps cannot be compared."""
        if self.text is not None:
            config = AutoConfig.for_model(self.model_type, text_config={**COMMON, **self.text}, **self.changes)
        else:
            asked = {key: value for key, value in {**COMMON, **self.changes}.items() if value is not None}
            config = AutoConfig.for_model(self.model_type, **asked)
        for part in (config, config.get_text_config()):
            for key, value in list(vars(part).items()):
                if "drop" in key and isinstance(value, float):
                    setattr(part, key, 0.0)
        return config


FAMILIES: dict[str, Family] = {}


def _add(
    name: str,
    model_type: str | None = None,
    *,
    model_class: str | None = None,
    text: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    FAMILIES[name] = Family(model_type or name, changes, text, model_class)


MAMBA = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.5, 2.0, 3.0, 5.0, 8.0, 12.0]

_add("llama", tie_word_embeddings=False)
_add("qwen3", tie_word_embeddings=True)
_add("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1)
_add("mistral", sliding_window=7)
_add("gemma3_text", sliding_window=7, num_hidden_layers=6, query_pre_attn_scalar=12)
_add(
    "gemma3",
    text={"sliding_window": 7, "num_hidden_layers": 6, "query_pre_attn_scalar": 12},
    vision_config=VISION,
    mm_tokens_per_image=4,
    boi_token_index=120,
    eoi_token_index=121,
    image_token_index=122,
)
_add("gemma2", sliding_window=7, attn_logit_softcapping=20.0, final_logit_softcapping=15.0, query_pre_attn_scalar=12)
_add(
    "phi3_longrope",
    "phi3",
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 128,
    },
    original_max_position_embeddings=128,
)
_add(
    "phi4_mini",
    "phi3",
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": SHORT[:3],
        "long_factor": LONG[:3],
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
    },
    original_max_position_embeddings=128,
)
_add("phi3_window", "phi3", sliding_window=7)
_add("qwen3_moe", **MOE)
_add(
    "gpt_oss",
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=7,
    layer_types=["sliding_attention", "full_attention"],
    rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
)
_add("mixtral", num_local_experts=4, num_experts_per_tok=2)
_add(
    "ministral3",
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)
_add("smollm3", num_hidden_layers=4)
_add("granite", logits_scaling=4.0, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5)
_add(
    "granitemoehybrid",
    **MAMBA,
    num_local_experts=4,
    num_experts_per_tok=2,
    shared_intermediate_size=40,
    layer_types=["linear_attention", "full_attention"],
    logits_scaling=4.0,
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    residual_multiplier=0.5,
)
_add(
    "granite4_dense_attn",
    "granitemoehybrid",
    **MAMBA,
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=40,
    layer_types=["full_attention", "full_attention"],
    position_embedding_type="rope",
)
_add("lfm2", layer_types=["conv", "full_attention"], num_hidden_layers=2, block_multiple_of=16, full_attn_idxs=[1])
_add("qwen3_5_text", **GDN)
_add(
    "qwen3_5",
    text=dict(**GDN),
    model_class="Qwen3_5ForConditionalGeneration",
    image_token_id=120,
    video_token_id=121,
    vision_start_token_id=122,
    vision_end_token_id=123,
    vision_config={
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    },
)
_add("qwen3_5_moe", "qwen3_5_moe_text", **GDN, **MOE, shared_expert_intermediate_size=16)
_add("qwen3_next", **GDN, **MOE, shared_expert_intermediate_size=16)
_add(
    "falcon_h1",
    **{**MAMBA, "mamba_d_ssm": 96},
    lm_head_multiplier=0.5,
    embedding_multiplier=2.0,
    key_multiplier=0.7,
    attention_out_multiplier=0.8,
    attention_in_multiplier=0.9,
    ssm_in_multiplier=0.9,
    ssm_out_multiplier=0.8,
    mlp_multipliers=[0.9, 0.8],
    ssm_multipliers=[0.9, 0.8, 0.7, 0.6, 0.5],
)
_add(
    "llama4_text",
    num_local_experts=4,
    num_experts_per_tok=1,
    intermediate_size_mlp=96,
    num_hidden_layers=4,
    attention_chunk_size=32,
    interleave_moe_layer_step=2,
    moe_layers=[1, 3],
    no_rope_layers=[1, 1, 1, 0],
    floor_scale=32,
    layer_types=["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
)
_add(
    "gemma4_text",
    num_hidden_layers=6,
    sliding_window=7,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=128,
    num_kv_shared_layers=2,
    per_layer_config={},
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)
_add(
    "gemma4",
    text={
        "num_hidden_layers": 6,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 2,
        "per_layer_config": {},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    boi_token_id=120,
    eoi_token_id=121,
    image_token_id=122,
    video_token_id=123,
    boa_token_id=124,
    audio_token_id=125,
    eoa_token_index=126,
)
_add("olmo2")
_add("olmo3", sliding_window=7, layer_types=["sliding_attention", "full_attention"])
_add("glm4", partial_rotary_factor=0.5)
_add("glm4_moe_lite", **MLA, mlp_layer_types=["dense", "sparse"])
_add("deepseek_v3", **MLA, first_k_dense_replace=1)
_add("exaone4", sliding_window=7, layer_types=["sliding_attention", "full_attention"])
_add("ernie4_5")
_add("hunyuan_v1_dense")
_add("seed_oss")
_add("apertus", hidden_act="xielu")
_add("qwen2_moe", **MOE, shared_expert_intermediate_size=32, decoder_sparse_step=1)
_add("olmoe", num_experts=4, num_experts_per_tok=2)
_add("cohere2", sliding_window=7, layer_types=["sliding_attention", "full_attention"], logit_scale=0.25)
_add("starcoder2", sliding_window=7)
_add("gpt2", n_embd=48, n_layer=2, n_head=4, n_positions=512)
_add("opt", ffn_dim=80, word_embed_proj_dim=48)
_add("phi", partial_rotary_factor=0.5)
_add("stablelm", partial_rotary_factor=0.5)
_add("nemotron", partial_rotary_factor=0.5)
_add(
    "nemotron_h",
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    ssm_state_size=8,
    mamba_num_heads=4,
    mamba_head_dim=24,
    n_groups=1,
    conv_kernel=4,
    expand=2,
    chunk_size=16,
    n_routed_experts=4,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=16,
    num_hidden_layers=None,
)
_add("mamba2", num_heads=4, head_dim=24, state_size=8, expand=2, conv_kernel=4, n_groups=1, chunk_size=16)
_add(
    "llama4",
    text={
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 4,
        "attention_chunk_size": 32,
        "interleave_moe_layer_step": 2,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 32,
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
    },
    model_class="Llama4ForConditionalGeneration",
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
)
_add(
    "mistral3",
    text={"model_type": "mistral"},
    model_class="Mistral3ForConditionalGeneration",
    image_token_index=120,
    vision_config={
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "head_dim": 8,
    },
)
_add(
    "mllama",
    model_class="MllamaForConditionalGeneration",
    text={"cross_attention_layers": [1], "num_hidden_layers": 2, "vocab_size": 128},
    image_token_index=120,
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    },
)
_add(
    "qwen2_5_vl",
    text={},
    model_class="Qwen2_5_VLForConditionalGeneration",
    vision_config={
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 48,
        "fullatt_block_indexes": [0],
    },
    image_token_id=120,
    video_token_id=121,
)
_add(
    "qwen2_vl",
    text={},
    model_class="Qwen2VLForConditionalGeneration",
    vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 4},
    image_token_id=120,
    video_token_id=121,
)
_add(
    "qwen3_vl",
    text={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}},
    model_class="Qwen3VLForConditionalGeneration",
    image_token_id=120,
    video_token_id=121,
    vision_config={
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
)
_add(
    "smolvlm",
    text={"model_type": "llama"},
    model_class="SmolVLMForConditionalGeneration",
    image_token_id=120,
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    },
    scale_factor=2,
)
