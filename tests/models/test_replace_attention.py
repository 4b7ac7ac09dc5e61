"""FrugalAttention: families, generation, what it leaves alone, and that the proof finds wrong ones."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from frugal.codecs.nf4 import NF4Linear
from frugal.models.attention import use_attention
from frugal.models.modules.attention import FrugalAttention, attention_candidate, attention_mismatch
from frugal.models.replacement import replace_modules
from tests.support.tiny_models import FAMILIES, tiny_model


def _peft(family, *, nf4=False, attention="frugal", config=None, **changes):
    model = tiny_model(family, **changes)
    if nf4:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and "lm_head" not in name:
                model.set_submodule(name, NF4Linear.from_linear(module))
    if attention == "frugal":
        use_attention(model)
    torch.manual_seed(0)
    config = config or LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).train()


def _batch(packed, seed=5):
    ids = torch.randint(3, 131, (1 if packed else 2, 24), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids}
    if packed:
        lengths = (11, 1, 12)
        offsets = torch.tensor([0, 11, 12, 24], dtype=torch.int32)
        batch |= {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "cu_seq_lens_q": offsets,
                  "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}  # fmt: skip
    return batch


def _step(model, packed):
    model.zero_grad()
    loss = model(**_batch(packed), use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _same(got, want, tol=1e-5):
    torch.testing.assert_close(got[0], want[0], rtol=tol, atol=tol)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).abs().max() <= tol * max(1.0, grad.abs().max()), name


def _attentions(model):
    return [m for m in model.modules() if isinstance(m, FrugalAttention)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, nf4, packed):
    model = _peft(family, nf4=nf4)
    want = _step(model, packed)
    keys, adapter_keys = list(model.state_dict()), list(get_peft_model_state_dict(model))
    report = replace_modules(model)
    assert len(_attentions(model)) == model.config.num_hidden_layers, str(report)
    _same(_step(model, packed), want)
    assert list(model.state_dict()) == keys
    assert list(get_peft_model_state_dict(model)) == adapter_keys


def test_partial_rotation():
    model = _peft("phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    want = _step(model, False)
    replace_modules(model)
    assert len(_attentions(model)) == 2
    _same(_step(model, False), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_and_without_cache(family):
    model, stock = _peft(family).eval(), _peft(family).eval()
    replace_modules(model)
    prompt = torch.arange(5, 14)[None]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = stock.generate(input_ids=prompt, **settings)
    assert torch.equal(model.generate(input_ids=prompt, **settings), want)
    assert torch.equal(model.generate(input_ids=prompt, use_cache=False, **settings), want)


def test_it_is_still_what_transformers_looks_for():
    model, stock = tiny_model("llama", attn_implementation="eager"), tiny_model("llama", attn_implementation="eager")
    was = type(model.model.layers[0].self_attn)
    replace_modules(model)
    assert isinstance(model.model.layers[0].self_attn, was)
    ids = torch.arange(5, 14)[None]
    got, want = (m(input_ids=ids, output_attentions=True, use_cache=False).attentions for m in (model, stock))
    assert len(got) == len(want) == 2
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_with_attention_that_is_not_frugals(attention):
    model = _peft("qwen3", attention=None, attn_implementation=attention)
    want = _step(model, False)
    replace_modules(model)
    assert len(_attentions(model)) == 2
    _same(_step(model, False), want)


def test_dropout_in_attention_is_passed_on():
    model = _peft("llama", attention=None, attn_implementation="sdpa", attention_dropout=0.3)
    torch.manual_seed(1)
    want = _step(model, False)
    replace_modules(model)
    torch.manual_seed(1)
    _same(_step(model, False), want)


def test_rotation_lies_in_the_projections_memory_and_hooks_see_true_outputs():
    model = _peft("llama", nf4=True)
    replace_modules(model)
    attention = _attentions(model)[0]
    x, angle = torch.randn(1, 6, 48), torch.rand(1, 6, 6)
    pair = tuple(torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    made = []
    handle = attention.q_proj.register_forward_hook(lambda m, a, out: made.append((out, out.detach().clone())))
    watched = attention(x, position_embeddings=pair, attention_mask=None)[0]
    handle.remove()
    assert torch.equal(*made[0]), "what the hook was given is not overwritten"
    torch.testing.assert_close(attention(x, position_embeddings=pair, attention_mask=None)[0], watched)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attention(x.requires_grad_() * 1, position_embeddings=pair, attention_mask=None)
    sizes = [t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in kept}.values()]
    # x of the three projections; rotated q; k, v (half as wide); attention's output, which is o_proj's input too
    assert sum(size >= 6 * 48 * 4 for size in sizes) <= 4


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "sinks"),
        ("cohere", {}, "differs"),  # interleaved pairs
        ("olmo", {"clip_qkv": 20.0}, "differs"),  # clips what is large
        ("ministral3", {}, "differs"),  # scales queries at far positions
    ],
)
def test_what_is_left_alone(family, changes, reason):
    model = tiny_model(family, **changes)
    report = replace_modules(model)
    rows = [row for row in report.rows if row.was.endswith("Attention")]
    assert rows
    assert all(row.became is None for row in rows)
    assert all(reason in row.reason for row in rows), rows


def test_a_changed_module_is_found_out():
    attention = tiny_model("gemma2").model.layers[0].self_attn
    good = attention_candidate(attention)
    assert attention_mismatch(attention, good, torch.float32) is None
    for setting, value, words in (("sliding_window", 7, "sliding_window"), ("softcap", 3.0, "softcap")):
        wrong = attention_candidate(attention)
        wrong.frugal_extra = {**wrong.frugal_extra, setting: value}
        assert attention_mismatch(attention, wrong, torch.float32) == f"other settings of attention: {words}"
    wrong = attention_candidate(attention)
    wrong.frugal_rotates = False
    assert "differs" in attention_mismatch(attention, wrong, torch.float32)
    wrong = attention_candidate(attention)
    wrong.scaling = 0.5
    assert "differs" in attention_mismatch(attention, wrong, torch.float32)
    assert attention.config._attn_implementation != "frugal_proof"
    attention.further = nn.Linear(2, 2)
    assert attention_candidate(attention) == "the attention has further layers: further"


def test_trained_norms_get_their_gradients():
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["q_norm", "k_norm"],
                        init_lora_weights=False)  # fmt: skip
    model = _peft("qwen3", config=config)
    want = _step(model, False)
    assert any("q_norm" in name for name in want[1])
    replace_modules(model)
    _same(_step(model, False), want)
