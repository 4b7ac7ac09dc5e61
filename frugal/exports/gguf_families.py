"""Model families that a GGUF file can be written for: llama.cpp's name, what it turns round in the weights, its keys.

Names of tensors are those of the `gguf` package's own maps. What llama.cpp fixes in code for a family (which layers
have a window, how scores are scaled) is compared with the model's configuration, and a model that differs is refused:
its file would load and answer wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import gguf
import torch

from frugal.errors import UnsupportedError

Writer: TypeAlias = Any
"""`gguf.GGUFWriter`; the package has no types."""


@dataclass(frozen=True)
class Family:
    """One row: a family, and how llama.cpp wants it."""

    arch: gguf.MODEL_ARCH
    interleaved: bool = False
    """llama.cpp rotates neighbours (2i, 2i + 1), transformers halves: rows of queries and keys change place."""
    norm_shift: float = 0.0
    """Added to the weights of norms: Gemma's norms multiply by 1 + weight, llama.cpp's by weight."""
    keys: Callable[[Writer, Any], None] = lambda writer, config: None
    """Writes what the family has besides the common keys."""
    fixed: Callable[[Any], str | None] = lambda config: None
    """What llama.cpp computes otherwise than this configuration says; None when nothing."""
    ignores_windows: bool = False
    """llama.cpp attends to the whole context where the configuration has a window."""


def _gemma(every: int) -> Callable[[Any], str | None]:
    def fixed(config: Any) -> str | None:
        wanted = [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(config.num_hidden_layers)
        ]
        if list(config.layer_types) != wanted:
            return f"every {every}th layer attends to all; layer_types say otherwise"
        if config.query_pre_attn_scalar not in (config.head_dim, config.hidden_size // config.num_attention_heads):
            return f"scores are scaled by the head's size {config.head_dim}, not by {config.query_pre_attn_scalar}"
        if getattr(config, "use_bidirectional_attention", False):
            return "attention looks back only"
        return None

    return fixed


def _gemma2_keys(writer: Writer, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping or 0.0)
    writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)


def _gemma2_fixed(config: Any) -> str | None:
    if not config.attn_logit_softcapping or not config.final_logit_softcapping:
        return "scores and logits are capped"
    return _gemma(2)(config)


def _gemma3_keys(writer: Writer, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(rope(config, "sliding_attention")["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _gemma3_fixed(config: Any) -> str | None:
    local = rope(config, "sliding_attention")
    if local.get("rope_type", "default") != "default" or local["rope_theta"] != 10_000.0:
        return "layers with a window rotate with base 10000"
    return "scores are not capped" if config.attn_logit_softcapping else _gemma(6)(config)


def _granite_keys(writer: Writer, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _granite_fixed(config: Any) -> str | None:
    scales = (
        config.attention_multiplier,
        config.embedding_multiplier,
        config.residual_multiplier,
        config.logits_scaling,
    )
    return None if all(scales) else "a multiplier of 0 means that there is none"


def _smollm3_fixed(config: Any) -> str | None:
    wanted = [int((i + 1) % 4 != 0) for i in range(config.num_hidden_layers)]
    return (
        None if list(config.no_rope_layers) == wanted else "every 4th layer is without positions; no_rope_layers differ"
    )


def _phi3_keys(writer: Writer, config: Any) -> None:
    # llama.cpp tells Phi-4 (no window) from Phi-3 by a window of 0
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(
        getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    )


_ARCH = gguf.MODEL_ARCH
FAMILIES: dict[str, Family] = {
    "llama": Family(_ARCH.LLAMA, interleaved=True),
    "mistral": Family(_ARCH.LLAMA, interleaved=True, ignores_windows=True),
    "qwen2": Family(_ARCH.QWEN2, ignores_windows=True),
    "qwen3": Family(_ARCH.QWEN3, ignores_windows=True),
    "gemma2": Family(_ARCH.GEMMA2, norm_shift=1.0, keys=_gemma2_keys, fixed=_gemma2_fixed),
    "gemma3_text": Family(_ARCH.GEMMA3, norm_shift=1.0, keys=_gemma3_keys, fixed=_gemma3_fixed),
    "phi3": Family(_ARCH.PHI3, keys=_phi3_keys, ignores_windows=True),
    "smollm3": Family(_ARCH.SMOLLM3, interleaved=True, fixed=_smollm3_fixed, ignores_windows=True),
    "granite": Family(_ARCH.GRANITE, interleaved=True, keys=_granite_keys, fixed=_granite_fixed),
    "olmo2": Family(_ARCH.OLMO2),
}


def family_of(config: Any) -> Family:
    """The family of a model's configuration.

    Raises:
        UnsupportedError: a family that is not in the table, or a model that llama.cpp would compute otherwise.
    """
    kind = str(config.model_type)
    family = FAMILIES.get(kind)
    if family is None:
        raise UnsupportedError(
            f"GGUF cannot be written for the family {kind}; it can for {', '.join(FAMILIES)}. Use --to merged, and "
            "llama.cpp's convert_hf_to_gguf.py on the result."
        )
    problem = family.fixed(config) or _rotation_problem(config, family) or _width_problem(config, kind)
    if problem is not None:
        name = gguf.MODEL_ARCH_NAMES[family.arch]
        raise UnsupportedError(f"This {kind} model differs from what llama.cpp computes for {name}: {problem}.")
    return family


def window_note(config: Any, family: Family) -> str | None:
    """A sentence when llama.cpp leaves out a window that the model has, else None."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    used = window and window < config.max_position_embeddings and (types is None or "sliding_attention" in types)
    if not family.ignores_windows or not used:
        return None
    return (
        f"llama.cpp attends to all tokens where this model has a window of {window}; answers differ beyond that length"
    )


def rope(config: Any, layer_type: str = "full_attention") -> dict[str, Any]:
    """Settings of rotary positions, of one layer type where a model has several."""
    settings = getattr(config, "rope_parameters", None) or {}
    return dict(settings.get(layer_type) or settings)


def _rotation_problem(config: Any, family: Family) -> str | None:
    kind = rope(config).get("rope_type", "default")
    if kind in ("default", "linear") or (kind == "llama3" and family.interleaved):
        return None
    return f"rotary positions of type {kind} cannot be written here"


def _width_problem(config: Any, kind: str) -> str | None:
    if kind in ("granite", "phi3") and head_dim(config) * config.num_attention_heads != config.hidden_size:
        return "heads times their size are the width of the model"
    return None


def head_dim(config: Any) -> int:
    """Size of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def write_keys(writer: Writer, config: Any, family: Family, vocab_rows: int) -> None:
    """What llama.cpp must know of the model besides its weights."""
    writer.add_vocab_size(vocab_rows)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    size, settings = head_dim(config), rope(config)
    writer.add_key_length(size)
    writer.add_value_length(size)
    share = settings.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    writer.add_rope_dimension_count(int(size * share))
    writer.add_rope_freq_base(settings["rope_theta"])
    if settings.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(settings["factor"])
    family.keys(writer, config)


def rope_factors(config: Any) -> torch.Tensor | None:
    """Llama 3's divisor of each rotary frequency, a tensor of the file; None for other models."""
    settings = rope(config)
    if settings.get("rope_type") != "llama3":
        return None
    size = head_dim(config)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    trained = settings["original_max_position_embeddings"]
    waves = 2 * math.pi * settings["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    smooth = ((trained / waves - low) / (high - low)).clamp(0, 1)
    factors: torch.Tensor = 1 / ((1 - smooth) / settings["factor"] + smooth)
    return factors.float()


class Names:
    """Names of tensors in the file, and what becomes of their values on the way there and back."""

    def __init__(self, config: Any, family: Family) -> None:
        self._map = gguf.get_tensor_name_map(family.arch, config.num_hidden_layers)
        self._family = family
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def __call__(self, name: str) -> str:
        """The name in the file of a parameter of transformers' model."""
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnsupportedError(f"llama.cpp has no tensor for {name}: this model cannot be written as GGUF.")
        return str(found)

    def heads(self, name: str) -> int | None:
        """Heads whose rows change place; None for a tensor whose rows stay."""
        return self._heads.get(name.split(".")[-2]) if self._family.interleaved else None

    def shift(self, name: str) -> float:
        """What is added to the values."""
        return self._family.norm_shift if name.endswith("norm.weight") else 0.0


def to_interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys from halves to neighbours, head by head."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def to_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `to_interleaved`."""
    shape = rows.shape
    return rows.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)
