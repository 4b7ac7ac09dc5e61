"""rms_norm and rope against their definitions and transformers' own code."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from frugal.ops.rms_norm import rms_norm, rms_norm_reference
from frugal.ops.rope import rope, rope_joint, rope_pair, rope_reference

F64 = torch.float64


def _grads(fn, leaves, seed=3):
    y = fn(*leaves)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(y.dtype)
    used = [t for t in leaves if t is not None]
    return (y.detach(), *torch.autograd.grad(y, used, up))


def _close(got, want, tol=1e-10):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 7), (0, 4), (2, 1)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape, weighted, offset, monkeypatch):
    monkeypatch.setattr(sys.modules["frugal.ops.rms_norm"], "BLOCK_BYTES", 64)
    x = torch.randn(shape, dtype=F64).requires_grad_()
    w = torch.randn(shape[-1], dtype=F64).requires_grad_() if weighted else None
    got = _grads(lambda x, w: rms_norm(x, w, 1e-5, offset=offset), [x, w])
    _close(got, _grads(lambda x, w: rms_norm_reference(x, w, 1e-5, offset=offset), [x, w]))
    if x.numel():
        leaves = [x] if w is None else [x, w]
        assert torch.autograd.gradcheck(lambda x, w=None: rms_norm(x, w, 1e-5, offset=offset), leaves)


def test_rms_norm_equals_transformers():
    x = torch.randn(4, 16)
    for cls, offset in ((LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)):
        stock = cls(16, eps=1e-6)
        with torch.no_grad():
            stock.weight.normal_()
        torch.testing.assert_close(rms_norm(x, stock.weight, 1e-6, offset=offset), stock(x))


def test_rms_norm_non_contiguous_and_zero_rows():
    x = torch.randn(8, 6, dtype=F64).t().requires_grad_()
    w = torch.randn(8, dtype=F64)
    _close(_grads(lambda x: rms_norm(x, w, 1e-6), [x]), _grads(lambda x: rms_norm_reference(x, w, 1e-6), [x]))
    zero = torch.zeros(2, 8, dtype=F64, requires_grad=True)
    assert torch.autograd.grad(rms_norm(zero, w, 1e-6).sum(), zero)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_error_no_larger_than_naive(dtype):
    x, w = torch.randn(64, 96).to(dtype).requires_grad_(), torch.randn(96).to(dtype).requires_grad_()

    def naive(x, w):
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = _grads(lambda x, w: rms_norm_reference(x, w, 1e-5), wide)
    for mine, theirs, want in zip(
        _grads(lambda x, w: rms_norm(x, w, 1e-5), [x, w]), _grads(naive, [x, w]), truth, strict=True
    ):
        allowed = (theirs.double() - want).abs().max() + 2 * torch.finfo(dtype).eps * want.abs().max()
        assert (mine.double() - want).abs().max() <= allowed


def test_rms_norm_keeps_its_input_and_a_number_a_row():
    x, w = torch.randn(10, 32, requires_grad=True), torch.randn(32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
        rms_norm(x * 1, w, 1e-5)
    assert sum(t.numel() for t in kept) == 320 + 32 + 10


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_rope(interleaved, rotary, in_place):
    x = torch.randn(2, 3, 5, 8, dtype=F64).requires_grad_()
    angle = torch.rand(1, 1, 5, rotary, dtype=F64)
    cos, sin = angle.cos(), angle.sin() + 0.1  # any numbers, halves need not be equal
    got = _grads(lambda x: rope(x * 1, cos, sin, interleaved=interleaved, in_place=in_place), [x])
    _close(got, _grads(lambda x: rope_reference(x, cos, sin, interleaved=interleaved), [x]))
    assert torch.autograd.gradcheck(lambda x: rope(x * 1, cos, sin, interleaved=interleaved, in_place=in_place), [x])


def test_rope_equals_transformers_in_place_on_a_view():
    q, k = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 5, 6)
    angle = torch.rand(2, 5, 3)
    cos, sin = (torch.cat([f, f], -1) for f in (angle.cos(), angle.sin()))
    heads_q, heads_k = (t.view(2, 5, -1, 6).transpose(1, 2) for t in (q, k))
    want, _ = apply_rotary_pos_emb(heads_q, heads_k, cos, sin)
    made = torch.nn.functional.linear(q, torch.eye(12))
    got = rope(made.view(2, 5, -1, 6).transpose(1, 2), cos[:, None], sin[:, None], in_place=True)
    assert got.data_ptr() == made.data_ptr()
    torch.testing.assert_close(got, want)
    up = torch.randn(got.shape)
    torch.testing.assert_close(torch.autograd.grad(got, q, up), torch.autograd.grad(want, q, up))


@pytest.mark.parametrize("block_bytes", [2**18, 1])
@pytest.mark.parametrize("rotary", [6, 4])
def test_rope_pair_on_views_of_one_tensor(rotary, block_bytes, monkeypatch):
    """q and k of a joint projection: in place, the rest untouched, gradients as with the definition."""
    monkeypatch.setattr(sys.modules["frugal.ops.rope"], "CPU_BLOCK_BYTES", block_bytes)
    joint = torch.randn(2, 37, 24, dtype=F64).requires_grad_()
    angle = torch.rand(2, 37, rotary // 2, dtype=F64)
    cos, sin = angle.cos() * 1.5, angle.sin() * 1.5  # scaled tables (YaRN) are no pure rotation
    wide = [torch.cat([t, t], -1)[:, None] for t in (cos, sin)]

    def heads(t):
        return [part.view(2, 37, -1, 6).transpose(1, 2) for part in t.split([12, 6, 6], -1)]

    def ours(t):
        made = (t * 1).view(2, 37, 4, 6).transpose(1, 2)
        turned = rope_joint(made, 3, cos, sin)
        assert turned.data_ptr() == made.data_ptr()
        return turned

    def definition(t):
        q, k, v = heads(t)
        return torch.cat([rope_reference(q, *wide), rope_reference(k, *wide), v], 1)

    _close(_grads(ours, [joint]), _grads(definition, [joint]))

    def apart(t):
        q, k, _ = (part * 1 for part in heads(t))
        memory = [q.data_ptr(), k.data_ptr()]
        turned = rope_pair(q, k, cos, sin)
        assert [t.data_ptr() for t in turned] == memory
        return torch.cat([*turned, heads(t)[2]], 1)

    _close(_grads(apart, [joint]), _grads(definition, [joint]))


def test_rope_pair_cannot_go_wrong_in_silence():
    cos, sin = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    kept = torch.tanh(x)  # keeps its output for backward
    q, k = rope_pair(kept, torch.randn(1, 1, 3, 4), cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q.sum() + k.sum()).backward()
    with pytest.raises(ValueError, match="a leaf that requires grad"):
        rope_pair(x, kept, cos, sin)


def test_rope_never_overwrites_a_leaf():
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    before = x.detach().clone()
    rope(x, torch.zeros(3, 4), torch.ones(3, 4), in_place=True).sum().backward()
    assert torch.equal(x.detach(), before)


def test_run_without_memory():
    with FakeTensorMode():
        x = torch.empty(2, 3, 5, 8, requires_grad=True)
        y = rope(rms_norm(x, torch.empty(8), 1e-6), torch.empty(5, 8), torch.empty(5, 8), in_place=True)
        y.sum().backward()
        assert x.grad.shape == x.shape
