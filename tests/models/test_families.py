"""What the structure of families asks for: what text reaches, routers, experts, gated norms, scaled embeddings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from frugal.adapters.apply import apply_adapters
from frugal.adapters.files import load_adapter, save_adapter
from frugal.adapters.targets import resolve_targets
from frugal.codecs.dense import UpcastEmbedding, upcast_on_use
from frugal.config import LoraSection
from frugal.errors import ConfigError
from frugal.models.load import load_base
from frugal.models.replacement import replace_modules
from frugal.models.resolve import resolve_base
from frugal.models.skeleton import build_meta, insert_nf4, linear_kinds

TEXT: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
DEEPSEEK: dict[str, Any] = {
    **TEXT,
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
    "first_k_dense_replace": 1,
}
MOE = {**TEXT, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def gemma3() -> Any:
    config = AutoConfig.for_model("gemma3", text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    return build_meta(config, trust_remote_code=False)


def lora(**changes: Any) -> LoraSection:
    return LoraSection.model_validate({"r": 2, **changes})


@pytest.mark.parametrize("asked", ["all-linear", ["q_proj", "v_proj"], r".*\.(q_proj|fc1|v_proj)"])
def test_adapters_only_where_text_goes(asked: Any) -> None:
    """F08: half of the adapters were in the vision tower and stayed at their start."""
    targets = resolve_targets(gemma3(), lora(target_modules=asked))
    assert targets.layers
    assert all("language_model" in name for name in targets.layers)
    assert any("more get no adapter" in row.line() for row in targets.table)


def test_a_pattern_that_names_the_tower_alone_is_refused() -> None:
    """F08: there is nothing that text could train."""
    with pytest.raises(ConfigError, match="a text never runs through"):
        resolve_targets(gemma3(), lora(target_modules=["fc1"]))


def test_layers_that_look_at_pictures_get_no_adapter() -> None:
    """F08: mllama's cross-attention layers are skipped when there is no picture."""
    config = AutoConfig.for_model("mllama", text_config={**TEXT, "cross_attention_layers": [1]})
    targets = resolve_targets(build_meta(config, trust_remote_code=False), lora())
    assert targets.layers
    assert not any(".layers.1." in name for name in targets.layers)


def test_a_name_of_experts_is_explained() -> None:
    """F09: the recipe's `gate_proj` matches nothing, because experts are no layers."""
    model = build_meta(AutoConfig.for_model("qwen3_moe", **MOE), trust_remote_code=False)
    with pytest.raises(ConfigError, match=r"experts of this model are stacked in parameters \(.*experts.gate_up_proj"):
        resolve_targets(model, lora(target_modules=["q_proj", "gate_proj"]))


@pytest.mark.parametrize(("family", "words"), [("qwen3_moe", "experts"), ("gpt2", "no linear layers")])
def test_what_stays_dense_is_said_with_its_share(family: str, words: str, tmp_path: Path) -> None:
    """F09: NF4 was asked for, most of the weights stayed as they were, and not a word."""
    own = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 103} if family == "gpt2" else MOE
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **own))
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    report = load_base(resolve_base(str(tmp_path))).report
    dense = [
        p.numel() for n, p in model.named_parameters() if ".experts." in n or re.search(r"c_(attn|fc|proj).weight", n)
    ]
    share = sum(dense) / sum(p.numel() for p in model.parameters())
    assert any(f"{share:.1%} of the weights are {words}" in line for line in report.lines())


@pytest.mark.parametrize("family", ["falcon_h1", "mamba2"])
def test_layers_whose_adapter_kernels_pass_by_get_none(family: str) -> None:
    """F-list: PEFT refuses `out_proj` of these families, so all-linear leaves it out, and by name it is an error."""
    own = {"num_heads": 4, "head_dim": 16, "state_size": 8, "expand": 2, "n_groups": 1}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_ssm": 48, "mamba_d_state": 8, "mamba_n_groups": 1}
    config = AutoConfig.for_model(family, **{**TEXT, **(own if family == "mamba2" else mamba)})
    model = build_meta(config, trust_remote_code=False)
    layers = resolve_targets(model, lora()).layers
    assert any(name.endswith("in_proj") for name in layers)
    assert not any(name.endswith("out_proj") for name in layers)
    with pytest.raises(ConfigError, match="which PEFT refuses to adapt"):
        resolve_targets(model, lora(target_modules=["in_proj", "out_proj"]))


def test_routers_are_found_by_what_they_do() -> None:
    """M02: gemma4's `router.proj` was quantised and adapted."""
    own = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model("gemma4_text", **{**TEXT, **own, "hidden_size_per_layer_input": 0})
    model = build_meta(config, trust_remote_code=False)
    routers = [name for name, module in model.named_modules() if name.endswith("router.proj")]
    chosen, kept = linear_kinds(model)
    assert routers
    assert set(routers) <= set(kept)
    assert not set(routers) & set(chosen)
    assert not set(routers) & set(resolve_targets(model, lora()).layers)


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("ranks", [{}, {"gate_proj": 3}])
@pytest.mark.parametrize("by_peft", [False, True])
def test_names_that_peft_rewrites_are_adapted_as_asked(
    nf4: bool, ranks: dict[str, int], by_peft: bool, tmp_path: Path
) -> None:
    """M01: deepseek_v3's dense layers and shared experts; the file gives stock PEFT the same adapters, also when a
    trainer of others saved it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **DEEPSEEK))
    stock = AutoModelForCausalLM.from_config(base.config)
    stock.load_state_dict(base.state_dict())
    if nf4:
        insert_nf4(base, linear_kinds(base)[0], False)
        for module in base.modules():
            if hasattr(module, "encode_"):
                module.encode_("weight", torch.randn(module.out_features, module.in_features))
    section = lora(rank_pattern=ranks)
    applied = apply_adapters(base, section, seed=1)
    assert set(applied.layers) == set(resolve_targets(stock, section).layers)
    assert any("shared_experts.gate_proj" in name for name in applied.layers)
    if by_peft:
        applied.model.save_pretrained(tmp_path)
    else:
        save_adapter(applied.model, tmp_path)
    want = get_peft_model_state_dict(applied.model)
    again = AutoModelForCausalLM.from_config(stock.config)
    for got in (
        get_peft_model_state_dict(PeftModel.from_pretrained(stock, str(tmp_path))),
        get_peft_model_state_dict(load_adapter(again, tmp_path)),
    ):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


class GatedRMSNorm(nn.Module):
    """As mamba2's: right without a gate, and called with one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is not None:
            x = x * nn.functional.silu(gate)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def test_a_norm_that_takes_a_gate_stays_and_convolutions_are_no_experts() -> None:
    """F-list: the proof passed without the gate, and the first step called the new norm with two arguments."""
    model = nn.ModuleDict({"norm": GatedRMSNorm(8), "conv": nn.Conv1d(8, 8, 3, groups=8)})
    report = replace_modules(model, compute_dtype=torch.float32)
    assert [(row.name, row.became) for row in report.rows] == [("norm", None)]
    assert "also takes gate" in report.rows[0].reason


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_scaled_16_bit_embedding_gives_float32_rows(family: str) -> None:
    """F-list: subclasses of Embedding were missed, and the scale was multiplied in bfloat16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TEXT)).to(torch.bfloat16)
    ids = torch.arange(9)[None]
    want = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TEXT))
    want.load_state_dict(model.state_dict())
    keys = list(model.state_dict())
    upcast_on_use(model, torch.float32)
    table = model.get_input_embeddings()
    assert isinstance(table, UpcastEmbedding)
    assert table.weight.dtype == torch.bfloat16
    assert torch.equal(table(ids), want.get_input_embeddings()(ids))
    assert list(model.state_dict()) == keys


def test_a_linear_layer_of_another_kind_is_widened() -> None:
    """F-list: llama4's router is a linear layer of its own kind, and met float32 with 16-bit weights."""

    class Scores(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return super().forward(input).sigmoid(), None

    model = nn.ModuleDict({"router": Scores(8, 4, dtype=torch.bfloat16)})
    upcast_on_use(model, torch.float32)
    assert type(model["router"]) is Scores
    assert model["router"](torch.ones(2, 8))[0].dtype == torch.float32
