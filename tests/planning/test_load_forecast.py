"""The load phase: what the arithmetic says against the live bytes of real loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from frugal.adapters import apply_adapters
from frugal.config import LoraSection, MemorySection, ModelSection, TrainSection
from frugal.device import Device
from frugal.memory.meter import LiveBytesMeter
from frugal.models.attention import use_attention
from frugal.models.load import load_base
from frugal.models.replacement import replace_modules
from frugal.models.resolve import ResolvedModel
from frugal.planning.simulate import MemorySimulator, load_peak

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
LOADS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("llama", "nf4", "bfloat16", {"num_hidden_layers": 8, "vocab_size": 1000, "tie_word_embeddings": False}),
    ("llama", "nf4", "float32", {"num_hidden_layers": 8, "vocab_size": 1000, "tie_word_embeddings": True}),
    ("llama", "none", "bfloat16", {"num_hidden_layers": 4, "vocab_size": 1000}),
    ("llama", "nf4", "bfloat16", {"num_hidden_layers": 3, "vocab_size": 20_000, "tie_word_embeddings": False}),
    ("qwen3", "nf4", "bfloat16", {"num_hidden_layers": 6, "vocab_size": 1500, "tie_word_embeddings": True}),
    ("gemma2", "nf4", "float32", {"num_hidden_layers": 6, "vocab_size": 1500}),
    ("phi3", "nf4", "bfloat16", {"num_hidden_layers": 6, "vocab_size": 1500, "sliding_window": None}),
]


@pytest.mark.parametrize(("family", "quantize", "dtype", "changes"), LOADS)
def test_forecast_and_measured_peak_of_a_load(
    family: str, quantize: Any, dtype: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    sim = MemorySimulator(
        AutoConfig.from_pretrained(tmp_path), ModelSection(base="x", quantize=quantize), LoraSection(r=8),
        TrainSection(), MemorySection(), torch.float32, Device("cpu"),
    )  # fmt: skip
    forecast = load_peak(sim)
    with LiveBytesMeter(device="cpu") as meter:
        loaded = load_base(ResolvedModel("x", tmp_path, "folder", None), quantize=quantize)
        use_attention(loaded.model)
        model = apply_adapters(loaded.model, LoraSection(r=8), seed=0, quantize=quantize).model
        replace_modules(model, compute_dtype=torch.float32)
    error = forecast.bytes / meter.peak_bytes - 1
    told = f"forecast {forecast.bytes:,}, measured {meter.peak_bytes:,} ({error:+.2%}), at rest {sim.base_at_rest():,}"
    print(told)
    assert abs(error) <= 0.05, told + "\n" + meter.report().table()
