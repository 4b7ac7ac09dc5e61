"""A row's result depends on the row alone: layers with a running state and attention in chunks (F01, F02, U18)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from frugal.errors import UnsupportedError
from frugal.files import read_json
from frugal.models.attention import NAME, join_rows, use_attention
from frugal.ops.attention import attention, attention_reference
from frugal.run.train import train
from tests.conftest import make_tokenizer
from tests.support import runs

SMALL = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1}
STATEFUL: dict[str, dict[str, Any]] = {
    "lfm2": {"full_attn_idxs": [1], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 96, "head_dim": 12},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 12, "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 12, "num_experts": 0},
}  # fmt: skip
CHUNKED = {**SMALL, "num_hidden_layers": 4, "intermediate_size_mlp": 80, "head_dim": 12, "attention_chunk_size": 16,
           "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
           "no_rope_layers": [1, 1, 1, 0]}  # fmt: skip


def model_of(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **changes})).eval()


@pytest.mark.parametrize("family", STATEFUL)
def test_rows_of_models_with_a_running_state_are_not_joined(family: str) -> None:
    with torch.device("meta"):  # before a weight is read
        model = model_of(family, **STATEFUL[family])
    found = join_rows(model, NAME, packing=False)
    assert not found.value
    assert "running state" in found.reason
    with pytest.raises(UnsupportedError, match=r"data\.packing is true.*running state.*data\.packing: false"):
        join_rows(model, NAME, packing=True)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_rows_of_attention_are(family: str) -> None:
    model = model_of(family)
    assert join_rows(model, NAME, packing=False).value
    assert join_rows(model, "sdpa", packing=True).value
    assert not join_rows(model, "sdpa", packing=False).value


@pytest.mark.parametrize("tokens", [15, 16, 17, 40])
def test_chunked_attention_is_no_window(tokens: int) -> None:
    model = model_of("llama4_text", **CHUNKED)
    ids = torch.randint(3, 300, (2, tokens))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        found = use_attention(model)
        got = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(got, want, atol=1e-4)
    assert "chunks of 16 tokens" in found.reason
    with pytest.raises(UnsupportedError, match="chunks of 16 tokens"):
        join_rows(model, found.value, packing=True)


def test_a_window_of_zero_is_none() -> None:
    ids = torch.randint(3, 300, (1, 20))
    model = model_of("mistral", sliding_window=None)
    zero = model_of("mistral", sliding_window=0)
    zero.load_state_dict(model.state_dict())
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        use_attention(zero, prove=False)
        assert torch.allclose(zero(input_ids=ids, use_cache=False).logits, want, atol=1e-5)


def test_what_sdpa_cannot_do_is_refused_by_name() -> None:
    """M03: a window was dropped without a word."""
    q = torch.randn(1, 2, 12, 8)
    options: dict[str, Any]
    for options in ({"window": 3}, {"softcap": 5.0}, {"softcap": 5.0, "window": 3}):
        with pytest.raises(UnsupportedError, match="scaled_dot_product_attention has no"):
            attention(q, q, q, implementation="sdpa", **options)
        want = attention_reference(q, q, q, **options)
        assert torch.allclose(attention(q, q, q, implementation="blockwise", **options), want, atol=1e-5)
        if "softcap" in options:
            with pytest.raises(UnsupportedError, match="has no soft cap"):
                attention(q, q, q, implementation="cpu_flash", **options)
        else:
            assert torch.allclose(attention(q, q, q, implementation="cpu_flash", **options), want, atol=1e-5)


def test_one_step_is_the_same_in_every_batch(tmp_path: Path) -> None:
    """The first loss of four rows is the same padded side by side and one after the other."""
    base = tmp_path / "base"
    tokenizer = make_tokenizer(300)
    model = model_of("lfm2", **{**STATEFUL["lfm2"], "vocab_size": len(tokenizer)})
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    rows = runs.write_rows(tmp_path / "rows.jsonl", 4)
    losses = []
    for name, batch in (("together", 4), ("apart", 1)):
        config = runs.config(base, rows, tmp_path / name, lora={"lora_dropout": 0.0})
        config["train"].update(per_device_train_batch_size=batch, gradient_accumulation_steps=4 // batch, max_steps=1)
        train(config)
        log = [json.loads(line) for line in (tmp_path / name / "train_log.jsonl").read_text().splitlines()]
        losses.append(next(record["loss"] for record in log if record["step"] == 1))
    decided = read_json(tmp_path / "together" / "manifest.json")["implementations"]["rows of a micro-batch"]
    assert decided["chosen"] is False
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
