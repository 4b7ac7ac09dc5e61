"""linear_cross_entropy: values and gradients against the plain computation in float64."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from frugal.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


def _inputs(tokens=7, hidden=10, vocab=17, dtype=torch.float64, seed=0, rank=3):
    g = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, vocab, (tokens,), generator=g)
    if tokens > 3:
        labels[0] = -100
        labels[3] = -100
    return {
        "hidden": make(tokens, hidden),
        "weight": make(vocab, hidden) * 0.5,
        "labels": labels,
        "bias": make(vocab),
        "a": make(rank, hidden),
        "b": make(vocab, rank) * 0.3,
    }


def _run(fn, x, leaves, *, use_bias=False, use_lora=False, upstream=None, **options):
    t = {n: v.clone().requires_grad_(n in leaves) if v.is_floating_point() else v for n, v in x.items()}
    loss = fn(
        t["hidden"], t["weight"], t["labels"],
        bias=t["bias"] if use_bias else None,
        lora=(t["a"], t["b"], 0.7) if use_lora else None,
        **options,
    )  # fmt: skip
    wanted = [t[n] for n in leaves if n not in ("bias",) or use_bias]
    wanted = [w for w in wanted if w is not None]
    if not any(w.requires_grad for w in wanted):
        return loss, ()
    return loss, torch.autograd.grad(loss, wanted, upstream, allow_unused=True)


def _same(got, want, tol=1e-10):
    (loss, grads), (loss2, grads2) = got, want
    torch.testing.assert_close(loss, loss2, rtol=tol, atol=tol)
    for a, b in zip(grads, grads2, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=tol, atol=tol)


FEATURES = [
    {},
    {"softcap": 3.0},
    {"logit_scale": 0.4},
    {"label_smoothing": 0.1},
    {"use_bias": True},
    {"use_lora": True},
    {"softcap": 2.0, "logit_scale": 1.7, "label_smoothing": 0.2, "use_bias": True, "use_lora": True},
]


@pytest.mark.parametrize("options", FEATURES, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize(("chunk_tokens", "chunk_vocab"), [(1, None), (3, None), (100, None), (3, 5), (2, 1)])
def test_equals_plain_computation(options, reduction, chunk_tokens, chunk_vocab):
    x = _inputs()
    upstream = torch.randn(7, dtype=torch.float64) if reduction == "none" else torch.tensor(1.3, dtype=torch.float64)
    leaves = ["hidden", "weight", *(["bias"] if options.get("use_bias") else [])]
    leaves += ["a", "b"] if options.get("use_lora") else []
    got = _run(linear_cross_entropy, x, leaves, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab,
               reduction=reduction, upstream=upstream, **options)  # fmt: skip
    _same(got, _run(linear_cross_entropy_reference, x, leaves, reduction=reduction, upstream=upstream, **options))


@pytest.mark.parametrize("leaves", [["hidden"], ["weight"], ["a"], ["b"], ["a", "b"], ["hidden", "b"]], ids="+".join)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_only_what_is_trained_gets_a_gradient(leaves, reduction):
    x = _inputs()
    upstream = torch.randn(7, dtype=torch.float64) if reduction == "none" else None
    got = _run(linear_cross_entropy, x, leaves, chunk_tokens=2, use_lora=True, reduction=reduction, upstream=upstream)
    want = _run(linear_cross_entropy_reference, x, leaves, use_lora=True, reduction=reduction, upstream=upstream)
    _same(got, want)


def test_gradcheck():
    x = _inputs(tokens=5, hidden=4, vocab=9)

    def fn(h, w, b, a, lb):
        return linear_cross_entropy(h, w, x["labels"], bias=b, lora=(a, lb, 0.5), softcap=4.0, chunk_tokens=2,
                                    label_smoothing=0.1)  # fmt: skip

    leaves = [x[n].clone().requires_grad_() for n in ("hidden", "weight", "bias", "a", "b")]
    assert torch.autograd.gradcheck(fn, leaves)


def test_lora_reads_an_input_of_its_own():
    x = _inputs()
    h, a, b = (x[n].clone().requires_grad_() for n in ("hidden", "a", "b"))
    mask = (torch.rand(7, 10, generator=torch.Generator().manual_seed(1)) > 0.5).double() * 2
    loss = linear_cross_entropy(h, x["weight"], x["labels"], lora=(a, b, 0.7), lora_input=h * mask, chunk_tokens=2)
    got = torch.autograd.grad(loss, (h, a, b))
    logits = h @ x["weight"].t() + 0.7 * ((h * mask) @ a.t()) @ b.t()
    want = torch.nn.functional.cross_entropy(logits, x["labels"], reduction="sum")
    torch.testing.assert_close(loss, want)
    for g, w in zip(got, torch.autograd.grad(want, (h, a, b)), strict=True):
        torch.testing.assert_close(g, w)


def test_mean_by_a_given_count_and_all_masked():
    x = _inputs()
    loss, _ = _run(linear_cross_entropy, x, ["hidden"], reduction="mean", count=11)
    want, _ = _run(linear_cross_entropy_reference, x, ["hidden"], reduction="sum")
    torch.testing.assert_close(loss, want / 11)
    x["labels"].fill_(-100)
    for reduction in ("sum", "mean"):
        loss, (grad, d_weight) = _run(linear_cross_entropy, x, ["hidden", "weight"], reduction=reduction)
        assert loss == 0
        assert not grad.any()
        assert not d_weight.any()


def test_masked_tokens_are_never_read():
    x = _inputs()
    x["hidden"][0] = torch.nan
    loss, (grad,) = _run(linear_cross_entropy, x, ["hidden"])
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert not grad[0].any()


def test_no_tokens_at_all():
    x = _inputs(tokens=0)
    loss, (grad,) = _run(linear_cross_entropy, x, ["hidden"])
    assert loss == 0
    assert grad.shape == (0, 10)


def test_non_contiguous_input_and_second_backward():
    x = _inputs()
    hidden = torch.empty(10, 14, dtype=torch.float64)[:, ::2].t().copy_(x["hidden"]).requires_grad_()
    weight = torch.empty(10, 17, dtype=torch.float64).t().copy_(x["weight"])
    loss = linear_cross_entropy(hidden, weight, x["labels"], chunk_tokens=3)
    first = torch.autograd.grad(loss, hidden, torch.tensor(2.0).double(), retain_graph=True)[0]
    again = torch.autograd.grad(loss, hidden, torch.tensor(2.0).double())[0]
    want = _run(linear_cross_entropy_reference, x, ["hidden"])[1][0]
    torch.testing.assert_close(first, 2 * want)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_label_outside_the_vocabulary_is_an_error():
    x = _inputs()
    x["labels"][1] = 17
    with pytest.raises(IndexError, match=r"\[0, 17\)"):
        linear_cross_entropy(x["hidden"], x["weight"], x["labels"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_error_no_larger_than_naive_in_the_same_dtype(dtype, softcap):
    exact = _inputs(tokens=33, hidden=64, vocab=101, dtype=dtype)
    wide = {n: v.double() if v.is_floating_point() else v for n, v in exact.items()}
    leaves = ["hidden", "weight"]
    truth = _run(linear_cross_entropy_reference, wide, leaves, softcap=softcap, reduction="mean")

    def naive(hidden, weight, labels, *, bias, lora, softcap, reduction):
        logits = torch.nn.functional.linear(hidden, weight).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.nn.functional.cross_entropy(logits, labels)

    plain = _run(naive, exact, leaves, softcap=softcap, reduction="mean")
    got = _run(linear_cross_entropy, exact, leaves, softcap=softcap, reduction="mean", chunk_tokens=7)
    eps = torch.finfo(dtype).eps

    def error(result):
        values = [result[0], *result[1]]
        return [(v.double() - t).abs().max().item() for v, t in zip(values, [truth[0], *truth[1]], strict=True)]

    for mine, theirs, t in zip(error(got), error(plain), [truth[0], *truth[1]], strict=True):
        assert mine <= theirs + 2 * eps * t.abs().max().item()


class _Quantised:
    """A stand-in for a quantised head: hands out rows only."""

    def __init__(self, dense):
        self.dense, self.shape, self.most = dense, tuple(dense.shape), 0

    def dequantize_rows(self, start, stop, dtype):
        self.most = max(self.most, stop - start)
        return self.dense[start:stop].to(dtype)


@pytest.mark.parametrize("chunk_vocab", [None, 40])
def test_quantised_head(chunk_vocab, monkeypatch):
    monkeypatch.setattr("frugal.ops.weights.CPU_BLOCK_BYTES", 64 * 10 * 8)
    x = _inputs(vocab=300)
    head = _Quantised(x["weight"])
    hidden = x["hidden"].clone().requires_grad_()
    loss = linear_cross_entropy(hidden, head, x["labels"], chunk_tokens=2, chunk_vocab=chunk_vocab, softcap=9.0)
    (grad,) = torch.autograd.grad(loss, hidden)
    want = _run(linear_cross_entropy_reference, x, ["hidden"], softcap=9.0)
    _same((loss, (grad,)), want, 1e-6)  # quantised values come in fp32
    assert head.most <= 64


class _Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() > self.elements * 4:
                self.elements = t.untyped_storage().nbytes() // 4
        return out


@pytest.mark.parametrize("with_grad", [True, False])
def test_never_all_logits(with_grad):
    tokens, vocab = 256, 5003
    x = _inputs(tokens=tokens, hidden=8, vocab=vocab, dtype=torch.float32)
    hidden, weight = x["hidden"].requires_grad_(with_grad), x["weight"]
    with _Largest() as seen:
        loss = linear_cross_entropy(hidden, weight, x["labels"], chunk_tokens=16)
        if with_grad:
            loss.backward()
    assert seen.elements <= max(16 * vocab, weight.numel())


def test_runs_without_memory():
    with FakeTensorMode():
        hidden = torch.empty(100, 16, requires_grad=True)
        weight = torch.empty(1000, 16)
        labels = torch.zeros(100, dtype=torch.int64)
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=32, softcap=30.0, label_smoothing=0.1)
        loss.backward()
        assert hidden.grad.shape == (100, 16)


def test_every_combination_of_trained_parts_under_vocabulary_tiles():
    x = _inputs(tokens=5, vocab=15)
    names = ["hidden", "weight", "bias", "a", "b"]
    for n in range(1, 6):
        for leaves in itertools.combinations(names, n):
            got = _run(
                linear_cross_entropy, x, list(leaves), use_bias=True, use_lora=True, chunk_tokens=2, chunk_vocab=4
            )
            _same(got, _run(linear_cross_entropy_reference, x, list(leaves), use_bias=True, use_lora=True))
