"""N12: LoRA on a fused QKV matrix with grouped-query attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from frugal.adapters import Applied, apply_adapters
from frugal.config import LoraSection
from frugal.errors import ConfigError
from frugal.models.load import load_base
from frugal.models.resolve import ResolvedModel

HEADS, GROUPS, HEAD, HIDDEN = 4, 2, 6, 8  # 4 x 6 != 8
Q, K = HEADS * HEAD, GROUPS * HEAD


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        pad_token_id=0,
    )
    config.head_dim = HEAD
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def apply(folder: Path, **settings: object) -> Applied:
    source = ResolvedModel("tiny", folder, "folder", None)
    lora = LoraSection(**settings)  # type: ignore[arg-type]
    return apply_adapters(load_base(source, quantize="none").model, lora, seed=0, quantize="none")


def test_rows_outside_the_update_stay_exactly_zero(folder: Path) -> None:
    """B has one row per output row: with B zero on K's rows and the base zero, K is exactly zero, Q and V are not."""
    applied = apply(folder, target_modules=["qkv_proj"], r=2)
    layer = applied.model.base_model.model.model.layers[0].self_attn.qkv_proj
    assert layer.lora_B["default"].weight.shape == (Q + 2 * K, 2)
    layer.base_layer.weight.data.zero_()
    layer.lora_B["default"].weight.data.fill_(1.0)
    layer.lora_B["default"].weight.data[Q : Q + K] = 0
    out = layer(torch.randn(5, HIDDEN))
    assert torch.equal(out[:, Q : Q + K], torch.zeros(5, K))
    assert (out[:, :Q] != 0).all()
    assert (out[:, Q + K :] != 0).all()


def test_merged_equals_unmerged_also_for_a_rank_above_the_width(folder: Path) -> None:
    applied = apply(folder, target_modules=["qkv_proj", "o_proj"], r=16)  # rank 16 on an 8-wide layer
    for name, parameter in applied.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    ids = torch.tensor([[3, 7, 9, 11]])
    with torch.no_grad():
        before = applied.model(input_ids=ids).logits
        after = applied.model.merge_and_unload()(input_ids=ids).logits
        stock = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
    torch.testing.assert_close(before, after, atol=1e-6, rtol=1e-6)
    assert (before - stock).abs().max() > 1e-3


def test_a_part_of_a_fused_matrix_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'q_proj' matches no layer\. .*in one layer: qkv_proj"):
        apply(folder, target_modules=["q_proj", "v_proj"])
