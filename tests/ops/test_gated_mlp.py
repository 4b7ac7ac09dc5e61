"""gated_mlp: values and gradients against the definition, tiles, layouts, what is kept, and skipping in recompute."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from frugal.codecs.nf4 import quantize_nf4
from frugal.ops import recompute
from frugal.ops.gated_mlp import gated_mlp, gated_mlp_reference, tile_tokens_for
from frugal.ops.projection import Projection

F64 = torch.float64


def _case(tokens=11, hidden=10, inter=14, r=3, dtype=F64, fused=False, seed=0, quantised=False, lora=True, bias=True,
          train_w=True):  # fmt: skip
    g = torch.Generator().manual_seed(seed)

    def make(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=F64) * scale).to(dtype)

    leaves = [make(tokens, hidden).requires_grad_()]

    def projection(n_out, n_in):
        w = make(n_out, n_in, scale=n_in**-0.5)
        weight = quantize_nf4(w.float()) if quantised else w.requires_grad_(train_w)
        parts = [] if quantised or not train_w else [w]
        c = make(n_out).requires_grad_() if bias else None
        parts += [c] if bias else []
        ab = None
        if lora:
            ab = (make(r, n_in, scale=n_in**-0.5).requires_grad_(), make(n_out, r).requires_grad_(), 0.5)
            parts += ab[:2]
        leaves.extend(parts)
        return Projection(weight, c, ab)

    gate_up = (projection(2 * inter, hidden),) if fused else (projection(inter, hidden), projection(inter, hidden))
    return leaves, gate_up, projection(hidden, inter)


def _run(fn, case, **kw):
    leaves, gate_up, down = case
    y = fn(leaves[0], gate_up, down, **kw)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=F64).to(y.dtype)
    return (y.detach(), *torch.autograd.grad(y, leaves, up))


def _close(got, want, tol=1e-10):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tile", [1, 4, 11, 100])
def test_equals_definition(activation, fused, tile):
    case = _case(fused=fused)
    kw = {"activation": activation}
    _close(_run(gated_mlp, case, tile_tokens=tile, **kw), _run(gated_mlp_reference, case, **kw))


@pytest.mark.parametrize("kw", [{"quantised": True}, {"lora": False}, {"bias": False}, {"train_w": False},
                                {"train_w": False, "bias": False, "lora": False}, {"tokens": 0},
                                {"tokens": 90, "quantised": True, "fused": True}], ids=str)  # fmt: skip
def test_every_make(kw):
    case = _case(**kw)
    _close(_run(gated_mlp, case, tile_tokens=5), _run(gated_mlp_reference, case))


def test_only_input_or_only_adapters():
    leaves, gate_up, down = _case()
    want = _run(gated_mlp_reference, (leaves, gate_up, down))
    for pick in ([0], [1, 4], [len(leaves) - 1], [2]):
        y = gated_mlp(leaves[0], gate_up, down, tile_tokens=4)
        up = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=F64)
        got = torch.autograd.grad(y, [leaves[i] for i in pick], up)
        _close(got, [want[i + 1] for i in pick])
    frozen = Projection(down.weight.detach()), tuple(Projection(p.weight.detach()) for p in gate_up)
    x = leaves[0].detach()
    assert not gated_mlp(x, frozen[1], frozen[0]).requires_grad


def test_gradcheck():
    leaves, gate_up, down = _case(tokens=3, hidden=4, inter=3, r=2)

    def fn(x, *_):
        return gated_mlp(x, gate_up, down, activation="gelu_tanh", tile_tokens=2)

    assert torch.autograd.gradcheck(fn, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_no_larger_than_naive_in_the_same_dtype(dtype):
    case = _case(tokens=130, hidden=64, inter=96, dtype=dtype, train_w=False)
    leaves, gate_up, down = case

    def wide(p):
        return Projection(p.weight.double(), p.bias.double(), (p.lora[0].double(), p.lora[1].double(), 0.5))

    y = gated_mlp_reference(leaves[0].double(), tuple(wide(p) for p in gate_up), wide(down))
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=F64).to(dtype).double()
    truth = (y.detach(), *(g.double() for g in torch.autograd.grad(y, leaves, up)))
    plain, got = _run(gated_mlp_reference, case), _run(gated_mlp, case, tile_tokens=50)
    for mine, theirs, want in zip(got, plain, truth, strict=True):
        allowed = (theirs.double() - want).abs().max() + 4 * torch.finfo(dtype).eps * want.abs().max()
        assert (mine.double() - want).abs().max() <= allowed


class _Peak(TorchDispatchMode):
    """Largest single storage made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def test_nothing_of_intermediate_size_grows_with_the_sequence():
    tokens, hidden, inter = 1000, 8, 64
    leaves, gate_up, down = _case(tokens=tokens, hidden=hidden, inter=inter, dtype=torch.float32, train_w=False)
    kept = []
    with _Peak() as seen:
        with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
            y = gated_mlp(leaves[0], gate_up, down, tile_tokens=50)
        y.sum().backward()
    assert seen.bytes <= tokens * hidden * 4
    assert max(s.numel() for s in kept) == tokens * hidden


def test_tiles_are_even():
    assert tile_tokens_for(1024, 1536, 4, on_cpu=True) == 1024
    assert tile_tokens_for(2048, 1536, 4, on_cpu=True) == 1024
    assert tile_tokens_for(8192, 14336, 2, on_cpu=False) == 1024  # 8 tiles of even size, the bound is 1170
    assert tile_tokens_for(10, 1536, 4, on_cpu=True) == 10
    assert tile_tokens_for(0, 1536, 4, on_cpu=True) >= 1


def test_recompute_skips_the_forward():
    case = _case()
    want = _run(gated_mlp_reference, case)
    leaves, gate_up, down = case
    run = recompute.Pass("recompute", frozenset({0}))
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with recompute.running(run), Count():
        y = gated_mlp(leaves[0], gate_up, down, tile_tokens=4)
    assert not [f for f in calls if "mm" in str(f)]
    residual = leaves[0].detach() + y
    assert run.not_needed([residual]) == {0}
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=F64)
    _close(torch.autograd.grad(residual, leaves, up), want[1:])


def test_sizes_that_do_not_fit():
    leaves, gate_up, _ = _case()
    with pytest.raises(ValueError, match="gate and up"):
        gated_mlp(leaves[0], gate_up, gate_up[0])


def test_runs_without_memory():
    with FakeTensorMode():
        x = torch.empty(2, 33, 16, requires_grad=True)
        a = torch.empty(4, 16, requires_grad=True)
        b = torch.empty(24, 4, requires_grad=True)
        p = Projection(torch.empty(24, 16), None, (a, b, 1.0))
        y = gated_mlp(x, (p, p), Projection(torch.empty(16, 24)), tile_tokens=16)
        y.sum().backward()
        assert a.grad.shape == a.shape
