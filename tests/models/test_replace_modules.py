"""replace_modules: losses, adapters' gradients and keys equal those of the stock model, family by family."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn

from frugal.codecs.nf4 import NF4Linear
from frugal.models.modules.fused import FrugalGatedMLP, FrugalLoraLinear, FrugalRMSNorm
from frugal.models.replacement import mismatch, replace_modules
from tests.support.tiny_models import FAMILIES, tiny_model


def _peft(family, *, nf4=False, config=None, **changes):
    model = tiny_model(family, **changes)
    if nf4:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and "lm_head" not in name:
                model.set_submodule(name, NF4Linear.from_linear(module))
    torch.manual_seed(0)
    config = config or LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).train()


def _step(model, seed=5):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 131, (2, 23), generator=g)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _same(got, want, tol=1e-5):
    torch.testing.assert_close(got[0], want[0], rtol=tol, atol=tol)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).abs().max() <= tol * max(1.0, grad.abs().max()), name


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, nf4):
    model = _peft(family, nf4=nf4)
    want = _step(model)
    keys, adapter_keys = list(model.state_dict()), list(get_peft_model_state_dict(model))
    report = replace_modules(model)
    kinds = {row.became for row in report.replaced}
    assert kinds == {"FrugalLoraLinear", "FrugalGatedMLP", "FrugalRMSNorm", "FrugalAttention"}
    assert not report.kept, str(report)
    _same(_step(model), want)
    assert list(model.state_dict()) == keys
    assert list(get_peft_model_state_dict(model)) == adapter_keys
    assert not replace_modules(model).rows


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_small_tiles(family):
    model = _peft(family)
    want = _step(model)
    replace_modules(model, mlp_tile_tokens=7)
    _same(_step(model), want)


def test_saved_adapter_loads_in_stock_peft(tmp_path):
    model = _peft("llama")
    ids = torch.arange(5, 17)[None]
    replace_modules(model)
    model.eval()
    want = model(input_ids=ids, use_cache=False).logits
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    torch.testing.assert_close(stock(input_ids=ids, use_cache=False).logits, want, rtol=1e-5, atol=1e-5)


def test_disabled_switched_merged_and_several_adapters():
    model, stock = _peft("llama"), _peft("llama")
    replace_modules(model)
    ids = torch.arange(5, 17)[None]

    def both():
        a, b = (m.eval()(input_ids=ids, use_cache=False).logits for m in (model, stock))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        return a.detach()

    adapted = both()
    with model.disable_adapter(), stock.disable_adapter():
        assert (both() - adapted).abs().max() > 1e-3
    for m in (model, stock):
        torch.manual_seed(1)
        m.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"], use_rslora=True,
                                          init_lora_weights=False))  # fmt: skip
        m.set_adapter("other")
    other = both()
    for m in (model, stock):
        m.base_model.set_adapter(["default", "other"])
        for n, p in m.named_parameters():
            p.requires_grad_("lora_" in n)
    summed = both()
    assert (summed - other).abs().max() > 1e-3
    _same(_step(model), _step(stock))
    for m in (model, stock):
        m.merge_adapter()
    torch.testing.assert_close(both(), summed, rtol=1e-4, atol=1e-4)
    for m in (model, stock):
        m.unmerge_adapter()
    torch.testing.assert_close(both(), summed, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids, use_cache=False).logits, summed, rtol=1e-4, atol=1e-4)


def test_dropout_equals_pefts_for_one_seed():
    config = LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    model = _peft("llama", config=config)
    torch.manual_seed(3)
    want = _step(model)
    replace_modules(model)
    torch.manual_seed(3)
    _same(_step(model), want)


def test_proof_leaves_adapters_as_they_were():
    model = _peft("llama", config=LoraConfig(r=4, target_modules="all-linear"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    modes = {n: m.training for n, m in model.named_modules()}
    replace_modules(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(m.training == modes[n] for n, m in model.named_modules())
    assert all(p.grad is None for p in model.parameters())


def test_dora_trained_norms_and_hooks_stay_with_the_reason():
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, modules_to_save=["model.norm"])
    model = _peft("llama", config=config)
    handle = model.base_model.model.model.layers[0].input_layernorm.register_forward_hook(lambda m, a, o: None)
    want = _step(model)
    report = replace_modules(model)
    reasons = {row.name.removeprefix("base_model.model.model."): row.reason for row in report.kept}
    assert "DoraLinearVariant" in reasons["layers.0.self_attn.q_proj"]
    assert "DoraLinearVariant" in reasons["layers.1.mlp"]
    assert reasons["layers.0.input_layernorm"] == "the module has hooks"
    assert "PEFT keeps" in reasons["norm.original_module"]
    assert isinstance(model.base_model.model.model.layers[1].input_layernorm, FrugalRMSNorm)
    _same(_step(model), want)
    handle.remove()


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_compute_the_same(family):
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = _peft(family, config=config, **changes)
    want = _step(model)
    report = replace_modules(model)
    assert sum(row.became == "FrugalExperts" for row in report.rows) == 2
    assert not any(isinstance(m, FrugalGatedMLP) for m in model.modules())
    assert any(isinstance(m, FrugalLoraLinear) for m in model.modules())
    _same(_step(model), want)


def test_wrong_replacements_are_found_out():
    mlp = tiny_model("llama").model.layers[0].mlp
    good = FrugalGatedMLP(mlp, ("gate_proj", "up_proj"), "down_proj", "silu", None)
    assert mismatch(mlp, good, 48, torch.float32) is None
    swapped = FrugalGatedMLP(mlp, ("up_proj", "gate_proj"), "down_proj", "silu", None)
    assert "output differs" in mismatch(mlp, swapped, 48, torch.float32)
    other = FrugalGatedMLP(mlp, ("gate_proj", "up_proj"), "down_proj", "gelu", None)
    assert "differs" in mismatch(mlp, other, 48, torch.float32)

    class WrongGradient(FrugalGatedMLP):
        def forward(self, x):
            return super().forward(x.detach()) + 0 * x

    liar = WrongGradient(mlp, ("gate_proj", "up_proj"), "down_proj", "silu", None)
    assert "gradient of the input" in mismatch(mlp, liar, 48, torch.float32)


def test_unknown_activation_and_norm_stay():
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = nn.Tanh()

    class MeanNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

        def forward(self, x):
            return (x - x.mean(-1, keepdim=True)) * self.weight

    model.model.norm = MeanNorm()
    report = replace_modules(model)
    reasons = {row.name: row.reason for row in report.kept}
    assert "Tanh" in reasons["model.layers.0.mlp"]
    assert "no RMSNorm" in reasons["model.norm"]
    assert isinstance(model.model.layers[1].mlp, FrugalGatedMLP)


def test_report_prints_and_goes_into_the_manifest():
    report = replace_modules(_peft("llama"))
    text = str(report)
    assert "base_model.model.model.layers.*.mlp" in text
    assert "LlamaMLP -> FrugalGatedMLP" in text
    rows = json.loads(json.dumps(report.to_json()))
    mlp = next(row for row in rows if row["modules"].endswith("layers.*.mlp"))
    assert mlp["count"] == 2
    assert mlp["became"] == "FrugalGatedMLP"


def test_generation_after_swapping():
    model, stock = _peft("llama", nf4=True).eval(), _peft("llama", nf4=True).eval()
    replace_modules(model)
    prompt = torch.arange(5, 12)[None]
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(input_ids=prompt, **settings), stock.generate(input_ids=prompt, **settings))


def test_q_k_v_share_one_saved_input():
    model = _peft("llama", nf4=True)
    replace_modules(model)
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(2, 50, 48, requires_grad=True) * 1
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            layer(x)
    big = {s.untyped_storage().data_ptr() for s in kept if s.numel() >= x.numel()}
    assert big == {x.untyped_storage().data_ptr()}
