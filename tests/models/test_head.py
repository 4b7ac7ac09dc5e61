"""split_head: every family's head gives the stock logits, the stock loss and the stock gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from frugal.codecs.nf4 import NF4Linear
from frugal.models.head import shift_labels, split_head
from tests.support.tiny_models import FAMILIES, tiny_model


def _batch(vocab=131, rows=2, tokens=9, seed=3):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, tokens), generator=g)
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def _stock_sum(model, ids, labels):
    logits = model(input_ids=ids).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels(labels).flatten(), reduction="sum")


def test_shift_labels():
    labels = torch.tensor([[5, 6, 7], [-100, 8, 9]])
    assert shift_labels(labels).tolist() == [[6, 7, -100], [8, 9, -100]]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = tiny_model(family, attn_implementation="eager")
    spec = split_head(model)
    assert spec.exact, spec.reason
    ids, labels = _batch()
    grads = []
    for fn in (lambda: _stock_sum(model, ids, labels), lambda: spec.loss_sum({"input_ids": ids}, labels)):
        model.zero_grad()
        loss = fn()
        loss.backward()
        grads.append((loss, {n: p.grad.clone() for n, p in model.named_parameters()}))
    torch.testing.assert_close(grads[1][0], grads[0][0], rtol=1e-6, atol=1e-5)
    for name, grad in grads[0][1].items():
        torch.testing.assert_close(grads[1][1][name], grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("how", ["lora", "two adapters", "trained", "nf4", "disabled"])
def test_adapted_heads(how):
    model = tiny_model("llama")
    if how == "nf4":
        model.lm_head = NF4Linear.from_linear(model.lm_head)
    trained = ["lm_head"] if how == "trained" else None
    targets = ["q_proj"] if how in ("trained", "nf4") else ["q_proj", "lm_head"]
    config = LoraConfig(r=3, target_modules=targets, modules_to_save=trained, init_lora_weights=False)
    peft = get_peft_model(model, config)
    if how == "two adapters":
        peft.add_adapter("second", LoraConfig(r=2, lora_alpha=5, target_modules=["lm_head"], init_lora_weights=False))
        peft.base_model.set_adapter(["default", "second"])
    spec = split_head(peft)
    assert spec.exact, spec.reason
    if how == "disabled":
        peft.base_model.disable_adapter_layers()
        peft.get_input_embeddings().weight.requires_grad_()
    ids, labels = _batch()
    results = []
    for fn in (lambda: _stock_sum(peft, ids, labels), lambda: spec.loss_sum({"input_ids": ids}, labels)):
        peft.zero_grad()
        loss = fn()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in peft.named_parameters() if p.grad is not None}
        results.append((loss, grads))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-5)
    assert results[0][1].keys() == results[1][1].keys()
    assert how not in ("lora", "trained") or any("lm_head" in name for name in results[0][1])
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_dropout_on_the_heads_adapter():
    model = tiny_model("llama")
    peft = get_peft_model(model, LoraConfig(r=3, lora_dropout=0.5, target_modules=["lm_head"], init_lora_weights=False))
    spec = split_head(peft.train())
    ids, labels = _batch()
    torch.manual_seed(5)
    want = _stock_sum(peft, ids, labels)
    torch.manual_seed(5)
    torch.testing.assert_close(spec.loss_sum({"input_ids": ids}, labels), want, rtol=1e-6, atol=1e-5)


def test_measured_scale_and_unprovable_head():
    class Scaled(type(tiny_model("llama"))):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.37
            return out

    class Odd(type(tiny_model("llama"))):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.sin()
            return out

    base = tiny_model("llama")
    scaled = Scaled(base.config)
    spec = split_head(scaled)
    assert spec.exact
    assert spec.logit_scale == pytest.approx(0.37, rel=1e-4)
    odd = Odd(base.config).eval()
    spec = split_head(odd)
    assert not spec.exact
    assert "differs" in spec.reason
    ids, labels = _batch()
    torch.testing.assert_close(spec.loss_sum({"input_ids": ids}, labels), _stock_sum(odd, ids, labels))


def test_hooked_head_is_left_alone():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out + 1)
    spec = split_head(model)
    assert not spec.exact
    assert "hooks" in spec.reason


def test_modes_and_evaluation():
    model = tiny_model("qwen3").train()
    model.model.layers[0].eval()
    spec = split_head(model)
    assert model.training
    assert not model.model.layers[0].training
    ids, labels = _batch()
    with torch.no_grad():
        torch.testing.assert_close(spec.loss_sum({"input_ids": ids}, labels), _stock_sum(model, ids, labels))
