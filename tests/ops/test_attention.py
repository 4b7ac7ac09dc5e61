"""attention: every implementation against the masked definition in float64; nothing of size [S, S]."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from frugal.ops import attention, attention_reference, choose
from frugal.ops.attention import blockwise

FORMS = ["cpu_flash", "sdpa", "blockwise"]


def _qkv(batch=1, heads=4, kv=2, tokens=33, size=16, dtype=torch.float64, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, tokens, size), (batch, kv, tokens, size), (batch, kv, tokens, size)]
    return [(torch.randn(s, generator=g, dtype=torch.float64) * spread).to(dtype) for s in shapes]


def _grads(fn, qkv, upstream, **kw):
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = fn(*leaves, **kw)
    return (out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def _upstream(q, seed=9):
    return torch.randn(q.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _supported(form, window, softcap):
    return not (form == "sdpa" and (window or softcap)) and not (form == "cpu_flash" and softcap)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 1, 5, 32, 200])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("offsets", [None, (0, 1, 1, 18, 33), (0, 33)])
def test_equals_masked_definition(form, window, softcap, offsets):
    if not _supported(form, window, softcap):
        pytest.skip("the table refuses this row")
    qkv = _qkv()
    kw = {"window": window, "softcap": softcap, "cu_seqlens": offsets}
    got = _grads(attention, qkv, _upstream(qkv[0]), implementation=form, **kw)
    want = _grads(attention_reference, qkv, _upstream(qkv[0]), **kw)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["cpu_flash", "blockwise"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (300, None), (90, 3.0)])
def test_more_than_one_block(form, window, softcap, monkeypatch):
    if not _supported(form, window, softcap):
        pytest.skip("the table refuses this row")
    monkeypatch.setattr(blockwise, "CPU_BLOCK", 48)
    qkv = _qkv(batch=2, tokens=401, size=8)
    kw = {"window": window, "softcap": softcap, "cu_seqlens": (0, 150, 401, 802)}
    got = _grads(attention, qkv, _upstream(qkv[0]), implementation=form, **kw)
    want = _grads(attention_reference, qkv, _upstream(qkv[0]), **kw)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_documents_that_end_inside_a_row_of_a_batch(form):
    qkv = _qkv(batch=3, tokens=10)
    kw = {"cu_seqlens": torch.tensor([0, 10, 14, 20, 30], dtype=torch.int32)}
    got = _grads(attention, qkv, _upstream(qkv[0]), implementation=form, **kw)
    want = _grads(attention_reference, qkv, _upstream(qkv[0]), **kw)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["cpu_flash", "blockwise"])
def test_not_causal(form):
    qkv = _qkv(tokens=20)
    kw = {"causal": False, "cu_seqlens": (0, 7, 20)}
    got = _grads(attention, qkv, _upstream(qkv[0]), implementation=form, **kw)
    want = _grads(attention_reference, qkv, _upstream(qkv[0]), **kw)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["cpu_flash", "blockwise"])
def test_gradcheck(form):
    window = 3 if form == "cpu_flash" else 2
    softcap = None if form == "cpu_flash" else 2.0
    leaves = [t.requires_grad_() for t in _qkv(tokens=6, size=4, heads=2, kv=1)]

    def fn(q, k, v):
        return attention(q, k, v, cu_seqlens=(0, 2, 6), window=window, softcap=softcap, implementation=form)

    assert torch.autograd.gradcheck(fn, leaves)


def test_layouts_of_the_models_and_non_contiguous_last_axis():
    q, k, v = _qkv(tokens=12, size=8)
    want = attention_reference(q, k, v)
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    odd = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)]
    for parts in (by_token, odd):
        got = attention(*parts)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    # Models make q token by token and read the result so too: no copy must be needed for that.
    assert attention(*by_token).transpose(1, 2).is_contiguous()
    assert attention(*by_token, cu_seqlens=(0, 5, 12)).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_other_documents_have_exactly_no_influence(form):
    q, k, v = _qkv(dtype=torch.float32)
    offsets = (0, 9, 33)
    before = _grads(attention, (q, k, v), _upstream(q), cu_seqlens=offsets, implementation=form)
    for t in (q, k, v):
        t[:, :, 4] += 3.0
    after = _grads(attention, (q, k, v), _upstream(q), cu_seqlens=offsets, implementation=form)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, 9:], b[:, :, 9:])
    assert not torch.equal(before[0][:, :, :9], after[0][:, :, :9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["cpu_flash", "blockwise"])
def test_error_no_larger_than_naive_in_the_same_dtype(form, dtype):
    qkv = _qkv(dtype=dtype, tokens=65, size=32)
    truth = _grads(attention_reference, [t.double() for t in qkv], _upstream(qkv[0]))

    def naive(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        keep = torch.ones(65, 65, dtype=torch.bool).tril()
        return s.masked_fill(~keep, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    plain = _grads(naive, qkv, _upstream(qkv[0]))
    got = _grads(attention, qkv, _upstream(qkv[0]), implementation=form)
    for mine, theirs, t in zip(got, plain, truth, strict=True):
        allowed = (theirs.double() - t).abs().max() + 4 * torch.finfo(dtype).eps * t.abs().max()
        assert (mine.double() - t).abs().max() <= allowed


class _Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (64, None), (None, 20.0), (64, 20.0)])
def test_nothing_grows_with_the_square_of_the_length(window, softcap):
    tokens = 2048
    leaves = [t.requires_grad_() for t in _qkv(heads=2, kv=1, tokens=tokens, size=16, dtype=torch.float32)]
    saved = []
    with _Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = attention(*leaves, window=window, softcap=softcap)
        out.sum().backward()
    # A tile of scores for both heads, or a [2, S, 16] row tensor, whichever is larger; all scores would be 32 MiB.
    assert seen.bytes <= 2**20
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in (*leaves, out)) + 2 * tokens * 4


def test_runs_without_memory():
    with FakeTensorMode():
        leaves = [torch.empty(1, h, 64, 16, requires_grad=True) for h in (4, 2, 2)]
        offsets = torch.zeros(3, dtype=torch.int32)
        for kw in ({}, {"window": 8}, {"softcap": 5.0}):
            out = attention(*leaves, cu_seqlens=offsets, **kw)
            out.sum().backward()
            assert leaves[1].grad.shape == (1, 2, 64, 16)


def test_empty_batch_and_wrong_shapes():
    q, k, v = (t.requires_grad_() for t in _qkv(batch=0))
    out = attention(q, k, v)
    out.sum().backward()
    assert out.shape == q.shape
    q, k, v = _qkv()
    with pytest.raises(ValueError, match="multiple"):
        attention(q[:, :3], k, v)
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        attention(q, k, v, cu_seqlens=[0, 20, 10, 33])
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        attention(q, k, v, cu_seqlens=[0, 20])
    with pytest.raises(ValueError, match="at least 1"):
        attention(q, k, v, window=0)


def test_table_says_what_is_used_and_why():
    assert choose("attention", "cpu").value == "cpu_flash"
    capped = choose("attention", "cpu", softcap=50.0)
    assert capped.value == "blockwise"
    assert "soft cap" in capped.rejected["cpu_flash"]
    assert choose("attention", "cuda", torch.bfloat16).value == "sdpa"
    assert choose("attention", "cuda", torch.bfloat16, window=4096).value == "blockwise"
