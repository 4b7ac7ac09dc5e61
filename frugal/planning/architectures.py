"""Sizes of common public models, so that a plan needs no network and no accepted licence. Configuration values only.

Each row is what the model's config.json says and memory depends on. Multimodal families stand for their language part.
"""

from __future__ import annotations

from typing import Any

# name: (model_type, hidden, intermediate, layers, heads, kv heads, head size, vocabulary, tied, other values)
_ROWS: dict[str, tuple[str, int, int, int, int, int, int, int, bool, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, {}),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False, {}),
    "meta-llama/Llama-3.3-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False, {}),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True, {}),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True, {}),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, {}),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, {}),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, {}),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, {}),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False, {}),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False, {}),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, {}),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, {}),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True, {}),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, {}),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False, {}),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False, {}),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, 128, 152064, False, {}),
    "mistralai/Mistral-7B-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, False, {"sliding_window": None}),
    "mistralai/Mistral-Nemo-Base-2407": ("mistral", 5120, 14336, 40, 32, 8, 128, 131072, False,
                                         {"sliding_window": None}),
    "google/gemma-2-2b": ("gemma2", 2304, 9216, 26, 8, 4, 256, 256000, True, {}),
    "google/gemma-2-9b": ("gemma2", 3584, 14336, 42, 16, 8, 256, 256000, True, {}),
    "google/gemma-3-1b": ("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, True, {"sliding_window": 512}),
    "google/gemma-3-4b": ("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, True, {"sliding_window": 1024}),
    "google/gemma-3-12b": ("gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, True, {"sliding_window": 1024}),
    "google/gemma-3-27b": ("gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, True, {"sliding_window": 1024}),
    "microsoft/Phi-3-mini": ("phi3", 3072, 8192, 32, 32, 32, 96, 32064, False, {"sliding_window": None}),
    "microsoft/phi-4": ("phi3", 5120, 17920, 40, 40, 10, 128, 100352, False, {"sliding_window": None}),
    "microsoft/Phi-4-mini": ("phi3", 3072, 8192, 32, 24, 8, 128, 200064, True,
                             {"sliding_window": None, "partial_rotary_factor": 0.75}),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True, {}),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 2560, 32, 15, 5, 64, 49152, True, {}),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 8192, 24, 32, 32, 64, 49152, True, {}),
    "TinyLlama/TinyLlama-1.1B": ("llama", 2048, 5632, 22, 32, 4, 64, 32000, False, {}),
}  # fmt: skip

# Endings of names that say how a model was trained further: the sizes are those of the base.
_ENDINGS = ("-instruct-2407", "-base-2407", "-instruct-2507", "-thinking-2507", "-2507", "-2407", "-instruct",
            "-chat-v1.0", "-chat", "-4k-instruct", "-128k-instruct", "-base", "-pt", "-it",
            "-hf", "-instruct-v0.3")  # fmt: skip


def architectures() -> tuple[str, ...]:
    """Names of the table."""
    return tuple(_ROWS)


def _plain(name: str) -> str:
    short = name.rsplit("/", 1)[-1].lower().replace("meta-llama", "llama").replace("_", "-")
    for ending in sorted(_ENDINGS, key=len, reverse=True):
        if short.endswith(ending):
            return short.removesuffix(ending).replace("mistral-7b-v0.3", "mistral-7b").rstrip("-")
    return short.replace("mistral-7b-v0.3", "mistral-7b")


def known_architecture(name: str) -> Any | None:
    """The transformers configuration of a public model by its hub id or the last part of it; None for others.

    Variants count as their base: `meta-llama/Llama-3.1-8B-Instruct`, `qwen3-4b-instruct-2507`.
    """
    row = known_name(name)
    return None if row is None else _config(_ROWS[row])


def known_name(name: str) -> str | None:
    """The row of the table that ``name`` means, None for others."""
    wanted = _plain(name)
    return next((row for row in _ROWS if _plain(row) == wanted), None)


def _config(values: tuple[str, int, int, int, int, int, int, int, bool, dict[str, Any]]) -> Any:
    from transformers import AutoConfig  # seconds; the names above are asked for without it

    kind, hidden, intermediate, layers, heads, kv_heads, head_size, vocabulary, tied, others = values
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
        **others,
    )
