"""frugal attention inside real transformers models: packed equals separate, padding, windows, caps, decoding."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from frugal.errors import UnsupportedError
from frugal.models.attention import NAME, frugal_mask, join_rows, register, use_attention
from tests.support.tiny_models import FAMILIES, tiny_config, tiny_model

LENGTHS = (11, 1, 8, 13)


def _model(family, **changes):
    model = tiny_model(family, **changes)
    choice = use_attention(model)
    assert choice.value == NAME, choice.reason
    return model


def _rows(vocab=131, lengths=LENGTHS, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (1, n), generator=g) for n in lengths]


def _packed(rows):
    offsets = torch.tensor([0, *torch.tensor([r.shape[1] for r in rows]).cumsum(0)], dtype=torch.int32)
    longest = max(r.shape[1] for r in rows)
    return {
        "input_ids": torch.cat(rows, 1),
        "position_ids": torch.cat([torch.arange(r.shape[1]) for r in rows])[None],
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate_and_stock(family):
    model = _model(family)
    stock = tiny_model(family, attn_implementation="eager")
    rows = _rows()
    with torch.no_grad():
        packed = model(**_packed(rows), use_cache=False).logits
        separate = torch.cat([model(input_ids=r, use_cache=False).logits for r in rows], 1)
        eager = torch.cat([stock(input_ids=r, use_cache=False).logits for r in rows], 1)
    assert (packed - separate).abs().max() <= 1e-5
    assert (packed - eager).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_has_exactly_no_influence_on_another(family):
    model = _model(family)
    rows = _rows()
    rows[3] = rows[3].clone()
    with torch.no_grad():
        before = model(**_packed(rows), use_cache=False).logits
        rows[0][0, 4] = (rows[0][0, 4] + 1) % 131
        after = model(**_packed(rows), use_cache=False).logits
    assert torch.equal(before[:, 11:], after[:, 11:])
    assert not torch.equal(before[:, :11], after[:, :11])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_restarting_positions_alone_separate_documents(family):
    model, rows = _model(family), _rows()
    batch = _packed(rows)
    with torch.no_grad():
        want = model(**batch, use_cache=False).logits
        got = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        two = model(input_ids=batch["input_ids"].repeat(2, 1), position_ids=batch["position_ids"], use_cache=False)
        mixed = model(input_ids=batch["input_ids"], use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(two.logits[1:], want, rtol=0, atol=1e-5)  # products of two rows may round otherwise
    assert (mixed - want).abs().max() > 1e-3, "documents that see each other are a hundred times further off"


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_at_the_end(family):
    model, rows = _model(family), _rows()
    longest = max(LENGTHS)
    ids, mask = torch.zeros(4, longest, dtype=torch.int64), torch.zeros(4, longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : row.shape[1]], mask[i, : row.shape[1]] = row[0], 1
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for i, row in enumerate(rows):
            alone = model(input_ids=row, use_cache=False).logits[0]
            assert (logits[i, : row.shape[1]] - alone).abs().max() <= 1e-5


def test_padding_at_the_left_is_refused():
    model = _model("llama")
    ids, mask = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
    mask[1, :2] = 0
    with pytest.raises(UnsupportedError, match=r"row 1 .*padding_side='right'"):
        model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_stock(family):
    rows = _rows(lengths=(9, 9))
    ids = torch.cat(rows, 0)
    found = []
    for model in (_model(family), tiny_model(family, attn_implementation="eager")):
        out = model.train()(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        found.append((out.loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    for name, grad in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_and_without_cache(family):
    model = _model(family)
    stock = tiny_model(family, attn_implementation="eager")
    prompt = _rows(lengths=(10,))[0]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = stock.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, **settings), want)
    assert torch.equal(model.generate(prompt, use_cache=False, **settings), want)


def test_what_cannot_be_honoured_is_left_alone_with_the_reason():
    model = tiny_model("llama", attention_dropout=0.1)
    choice = use_attention(model)
    assert choice.value == "sdpa"
    assert "has no dropout, and this model asks for 0.1" in choice.reason
    assert model.config._attn_implementation == "sdpa"
    sinks = tiny_model("gpt_oss", attn_implementation="eager", num_local_experts=4, num_experts_per_tok=2)
    choice = use_attention(sinks)
    assert choice.value == "eager"
    assert "sinks" in choice.reason
    assert sinks.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("family", "kept", "reason"),
    [
        ("gpt2", "sdpa", "has no dropout, and this model asks for 0.1"),  # which it calls attn_pdrop
        ("gpt_oss", "eager", "sinks"),
    ],
)
def test_a_plan_and_a_run_keep_the_same_attention(family: str, kept: str, reason: str):
    """F-list: found by asking the model in training mode, not by the names of its configuration."""
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "gpt_oss" else {}
    config = tiny_config(family, **changes)
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(config)
    for model, prove in ((tiny_model(family, **changes), True), (planned, False)):
        choice = use_attention(model, prove=prove)
        assert choice.value == model.config._attn_implementation == kept
        assert reason in choice.reason
        assert not model.training or not prove


@pytest.mark.parametrize(("family", "leaks"), [("llama", False), ("gpt_oss", True), ("bloom", True)])
def test_packing_under_stock_attention_is_tried_on_two_rows(family: str, leaks: bool):
    """F-list: families that build their mask without positions see the row before; two rows side by side show it."""
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "gpt_oss" else {}
    model = tiny_model(family, **changes)
    if leaks:
        with pytest.raises(UnsupportedError, match=r"packing is true, but this model loses the borders of rows"):
            join_rows(model, model.config._attn_implementation, packing=True)
    else:
        assert join_rows(model, model.config._attn_implementation, packing=True).value is True
    assert join_rows(model, model.config._attn_implementation, packing=False).value is False


def test_custom_patterns_are_refused():
    def bidirectional(batch, head, q, kv):
        return (q >= kv) | (q < 4)

    with pytest.raises(UnsupportedError, match="later ones"):
        frugal_mask(1, 8, 8, mask_function=bidirectional, allow_is_causal_skip=False)
    with pytest.raises(UnsupportedError, match="pattern"):
        frugal_mask(1, 8, 8, mask_function=bidirectional, allow_is_causal_skip=False, use_vmap=True)


def test_registering_twice_and_touching_nothing_else():
    before = dict(AttentionInterface()._global_mapping)
    register()
    register()
    after = dict(AttentionInterface()._global_mapping)
    assert {k: v for k, v in after.items() if k != NAME} == {k: v for k, v in before.items() if k != NAME}


def test_no_square_mask_is_built():
    model = _model("mistral")
    seen = []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model(**_packed(_rows()), use_cache=False)
    handle.remove()
    assert not isinstance(seen[0], torch.Tensor)
