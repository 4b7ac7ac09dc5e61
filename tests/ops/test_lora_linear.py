"""lora_linear: values and gradients against the definition; what is kept; blocks; dropout; dtypes."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from frugal.codecs.nf4 import NF4Codec, quantize_nf4
from frugal.device import Device
from frugal.ops.lora_linear import lora_linear, lora_linear_reference
from frugal.ops.projection import LoraMatmul, Projection
from frugal.ops.simulated import simulating
from frugal.ops.weights import column_blocks, columns

F64 = torch.float64


def _tensors(tokens=6, n_in=10, n_out=14, r=3, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype)

    return {
        "x": make(tokens, n_in),
        "w": make(n_out, n_in),
        "bias": make(n_out),
        "a": make(r, n_in),
        "b": make(n_out, r),
    }


def _run(fn, t, leaves, *, weight=None, use_bias=True, use_lora=True, shape=None, seed=None, **kw):
    v = {n: s.clone().requires_grad_(n in leaves) for n, s in t.items()}
    x = v["x"] if shape is None else v["x"].view(*shape, -1)
    if seed is not None:
        torch.manual_seed(seed)
    y = fn(
        x, v["w"] if weight is None else weight, bias=v["bias"] if use_bias else None,
        lora=(v["a"], v["b"], 0.6) if use_lora else None, **kw,
    )  # fmt: skip
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=F64).to(y.dtype)
    used = [v[n] for n in leaves]
    return (y.detach(), *(torch.autograd.grad(y, used, up, allow_unused=True) if used else ()))


def _close(got, want, tol=1e-10):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


ALL = ["x", "w", "bias", "a", "b"]


@pytest.mark.parametrize(
    "leaves", [ALL, ["x", "a", "b"], ["x"], ["a"], ["b"], ["w"], ["bias"], ["x", "b"]], ids="+".join
)
@pytest.mark.parametrize("tokens", [1, 6, 50])
def test_equals_definition(leaves, tokens):
    t = _tensors(tokens=tokens)
    _close(_run(lora_linear, t, leaves), _run(lora_linear_reference, t, leaves))


@pytest.mark.parametrize(("use_bias", "use_lora"), [(False, True), (True, False), (False, False)])
def test_without_bias_or_adapter(use_bias, use_lora):
    t = _tensors()
    leaves = ["x", "w", *(["bias"] if use_bias else []), *(["a", "b"] if use_lora else [])]
    kw = {"use_bias": use_bias, "use_lora": use_lora, "shape": (2, 3)}
    _close(_run(lora_linear, t, leaves, **kw), _run(lora_linear_reference, t, leaves, **kw))


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 200), (40, 131)])
def test_nf4_in_blocks_of_rows(tokens, double, n_in, n_out, monkeypatch):
    monkeypatch.setattr("frugal.ops.weights.CPU_BLOCK_BYTES", 64 * n_in * 8)
    t = _tensors(tokens=tokens, n_in=n_in, n_out=n_out)
    weight = quantize_nf4(t["w"].float(), double)
    leaves = ["x", "bias", "a", "b"]
    _close(_run(lora_linear, t, leaves, weight=weight), _run(lora_linear_reference, t, leaves, weight=weight))


def test_gradcheck_with_and_without_merging():
    for tokens in (3, 60):
        t = _tensors(tokens=tokens, n_in=5, n_out=4, r=2)
        leaves = [t[n].requires_grad_() for n in ALL]
        assert torch.autograd.gradcheck(lambda x, w, c, a, b: lora_linear(x, w, bias=c, lora=(a, b, 0.5)), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [5, 400])
def test_error_no_larger_than_naive_in_the_same_dtype(dtype, tokens, monkeypatch):
    monkeypatch.setattr("frugal.ops.weights.CPU_BLOCK_BYTES", 64 * 64 * 2)
    t = _tensors(tokens=tokens, n_in=64, n_out=192, r=8, dtype=dtype)
    t["w"] /= 8
    t["a"] /= 8
    weight = quantize_nf4(t["w"])
    leaves = ["x", "a", "b"]
    truth = _run(lora_linear_reference, {n: v.double() for n, v in t.items()}, leaves, weight=weight)
    plain = _run(lora_linear_reference, t, leaves, weight=weight)
    got = _run(lora_linear, t, leaves, weight=weight)
    for mine, theirs, want in zip(got, plain, truth, strict=True):
        allowed = (theirs.double() - want).abs().max() + 2 * torch.finfo(dtype).eps * want.abs().max()
        assert (mine.double() - want).abs().max() <= allowed


def test_keeps_its_input_only_and_shares_it():
    t = _tensors(dtype=torch.float32)
    x = t["x"].clone().requires_grad_()
    a, b = nn.Parameter(t["a"]), nn.Parameter(t["b"])
    weight = quantize_nf4(torch.randn(14, 10))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
        for _ in range(3):  # q, k and v
            lora_linear(x, weight, lora=(a, b, 0.5))
    storages = {s.untyped_storage().data_ptr() for s in kept}
    assert storages == {s.untyped_storage().data_ptr() for s in (x, a, b)}
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
        lora_linear(x, weight, lora=(a.detach(), b.detach(), 0.5))
    assert x.untyped_storage().data_ptr() not in {s.untyped_storage().data_ptr() for s in kept}


@pytest.mark.parametrize("tokens", [6, 50])
def test_dropout_draws_what_pytorch_draws(tokens):
    t = _tensors(tokens=tokens)
    kw = {"dropout": 0.4, "seed": 11}
    _close(_run(lora_linear, t, ALL, **kw), _run(lora_linear_reference, t, ALL, **kw))


def test_non_contiguous_input_and_gradient():
    t = _tensors(tokens=10, n_in=10, n_out=10)
    x = t["x"].t().contiguous().t().requires_grad_()
    y = lora_linear(x, t["w"], lora=(t["a"], t["b"], 0.6)).t()
    (dx,) = torch.autograd.grad(y, x, t["x"])
    want = _run(lora_linear_reference, t, ["x"], use_bias=False)[0]
    torch.testing.assert_close(y.t(), want)
    full = t["w"] + 0.6 * t["b"] @ t["a"]
    torch.testing.assert_close(dx, t["x"].t() @ full)


def test_empty_input_wrong_width_and_autocast():
    t = _tensors(tokens=0)
    _close(_run(lora_linear, t, ALL), _run(lora_linear_reference, t, ALL))
    with pytest.raises(ValueError, match="takes 10"):
        lora_linear(torch.zeros(2, 9), t["w"])
    t = _tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lora_linear(t["x"], t["w"], lora=(t["a"], t["b"], 0.5))
    assert y.dtype == torch.bfloat16


def test_runs_without_memory():
    weight = quantize_nf4(torch.randn(64, 64))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 7, 64, requires_grad=True)
        a, b = torch.empty(4, 64, requires_grad=True), torch.empty(64, 4, requires_grad=True)
        for w in (torch.empty(64, 64), weight):
            lora_linear(x, w, lora=(a, b, 2.0)).sum().backward()
        lora_linear(x, weight, lora=(a, b, 2.0), dropout=0.1).sum().backward()
        assert x.grad.shape == x.shape
        assert b.grad.shape == b.shape


@pytest.mark.parametrize("kind", ["double", "single", "dense"])
@pytest.mark.parametrize("first", [True, False])
def test_input_gradients_of_blocks_of_columns_have_the_bits_of_the_whole(
    kind: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: blocks of rows summed in float32 had 1.4 times the error, and read and wrote that sum a block."""
    torch.manual_seed(0)
    dtype, tokens, n_in, n_out = torch.bfloat16, 24, 320, 128
    dense = torch.randn(n_out, n_in) * 0.05
    weight = dense if kind == "dense" else quantize_nf4(dense, kind == "double")
    dy, before = torch.randn(tokens, n_out).to(dtype), torch.randn(tokens, n_in).to(dtype)

    def gradient() -> torch.Tensor:
        run = LoraMatmul(Projection(weight), dtype, torch.device("cpu"), tokens)
        return run.input_grad(dy, before.clone(), first)

    whole = gradient()
    monkeypatch.setattr("frugal.ops.weights.CPU_BLOCK_BYTES", 64 * n_out * 2)
    ranges = column_blocks(weight, dtype, torch.device("cpu"))
    assert ranges == [(lo, lo + 64) for lo in range(0, n_in, 64)]
    cut: list[torch.Tensor] = []
    mm = torch.mm

    def counted(*args, **kwargs):
        cut.append(args[1])
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    assert torch.equal(gradient(), whole)
    assert not first or [tuple(one.shape) for one in cut] == [(n_out, 64)] * 5


def test_columns_of_nf4_are_those_of_the_whole() -> None:
    for double in (True, False):
        nf4 = quantize_nf4(torch.randn(70, 192), double)
        for dtype in (torch.float32, torch.bfloat16):
            whole = nf4.dequantize_rows(0, 70, dtype)
            assert torch.equal(columns(nf4, 64, 192, dtype), whole[:, 64:])
    with pytest.raises(ValueError, match="no whole blocks of 64"):
        nf4.columns(0, 40)
    assert column_blocks(quantize_nf4(torch.randn(8, 40)), torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_plans_cut_columns_without_values(device: str) -> None:
    """A large NF4 matrix in 16 bits, planned for a CPU, a GPU with kernels and one without."""
    for capability in (8, 6), (7, 0):
        mode = FakeTensorMode() if device == "cpu" else simulating(Device("cuda", capability=capability))
        with mode:
            weight = NF4Codec().empty((4096, 8192), device)
            dy = torch.empty(64, 4096, dtype=torch.bfloat16, device=device)
            dx = torch.empty(64, 8192, dtype=torch.bfloat16, device=device)
            assert column_blocks(weight, dy.dtype, torch.device(device))
            run = LoraMatmul(Projection(weight), dy.dtype, torch.device(device), 64)
            assert run.input_grad(dy, dx, False).shape == (64, 8192)


def test_dy_is_multiplied_by_b_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: A's gradient and the input's both need dy B; each read of dy is as large as the layer's output."""
    t = _tensors(dtype=torch.float32)
    a, b, x = (t[name].requires_grad_() for name in ("a", "b", "x"))
    y = lora_linear(x, t["w"], lora=(a, b, 0.5))
    seen: list[torch.Tensor] = []
    mm = torch.mm

    def counted(*args, **kwargs):
        seen.append(args[1])
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    y.sum().backward()
    assert [one.shape for one in seen].count(b.shape) == 1
