"""NF4 storage: bitsandbytes' numbers bit for bit, safe under fake tensors, casts and copies, right gradients."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from bitsandbytes import functional as bnb
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from frugal.codecs import nf4_codes as codes
from frugal.codecs.nf4 import NF4Linear, NF4Tensors, dequantize_nf4, quantize_nf4

SHAPES = [(64, 64), (192, 576), (96, 128), (5, 63), (4, 17), (7, 33), (3, 100), (300, 64), (1, 1), (64, 4096)]


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_those_of_bitsandbytes(shape: tuple[int, int], double: bool, dtype: torch.dtype) -> None:
    w = weight(*shape).to(dtype)
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double)
    ours = quantize_nf4(w, double)
    assert torch.equal(ours.packed.flatten(), packed.flatten())
    if double:
        assert torch.equal(ours.absmax.flatten(), state.absmax)
        assert ours.nested_absmax is not None
        assert torch.equal(ours.nested_absmax.view(torch.float32), state.state2.absmax)
    expected = bnb.dequantize_4bit(packed, state)
    assert torch.equal(dequantize_nf4(ours, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_on_and_beside_the_midpoints(dtype: torch.dtype) -> None:
    """Ties between two codes, extremes, zeros and denormals, in more than one piece."""
    code = codes.nf4_code(torch.device("cpu"))
    middle = (code[:-1] + code[1:]) / 2
    beside = [torch.nextafter(middle, torch.tensor(end)) for end in (-2.0, 2.0)]
    row = torch.cat([middle, *beside, code, torch.tensor([1.0, -1.0, 0.0])])
    scales = torch.logspace(-42, 4, 47)[:, None]
    w = torch.cat([torch.nn.functional.pad(row * scales, (0, 64)), torch.randn(5000, 128)]).to(dtype)
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
    ours = quantize_nf4(w)
    assert w.numel() > 4 * (1 << 17)
    assert torch.equal(ours.packed.flatten(), packed.flatten())
    assert torch.equal(ours.absmax.flatten(), state.absmax)
    assert torch.equal(dequantize_nf4(ours, dtype), bnb.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gather_and_the_kernel_agree(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Both CPU forms give the same bits; which one runs depends on the processor."""
    nf4 = quantize_nf4(weight(*shape))
    count = shape[0] * shape[1]
    gathered = codes._gather(nf4.packed.reshape(-1), nf4.scales, torch.empty(count, dtype=dtype))
    assert torch.equal(gathered.view(shape), dequantize_nf4(nf4, dtype))


@pytest.mark.parametrize("shape", [(300, 64), (40, 63), (9, 100), (20, 576)])
def test_rows(shape: tuple[int, int]) -> None:
    nf4 = quantize_nf4(weight(*shape))
    whole = dequantize_nf4(nf4)
    for start, stop in [(0, 1), (3, 7), (1, shape[0]), (shape[0] - 1, shape[0])]:
        assert torch.equal(nf4.dequantize_rows(start, stop, torch.float32), whole[start:stop])


def test_bytes_a_parameter() -> None:
    """4.127 bits a parameter with double quantisation, 4.5 without."""
    w = weight(1024, 4096)
    assert quantize_nf4(w).nbytes * 8 / w.numel() == pytest.approx(4.127, abs=1e-3)
    assert quantize_nf4(w, double=False).nbytes * 8 / w.numel() == 4.5


@pytest.mark.parametrize("shape", [(32, 64), (17, 63)])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradient(shape: tuple[int, int], bias: bool) -> None:
    linear = nn.Linear(shape[1], shape[0], bias=bias).requires_grad_(False)
    ours = NF4Linear.from_linear(linear)
    x = torch.randn(2, 3, shape[1], requires_grad=True)
    dense = ours.dequantize()
    expected = nn.functional.linear(x, dense, linear.bias)
    upstream = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, x, upstream)
    got = ours(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, x, upstream)[0], wanted)


def test_large_layers_go_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = NF4Linear.from_linear(nn.Linear(64, 300).requires_grad_(False))
    x = torch.randn(5, 64, requires_grad=True)
    whole = ours(x)
    (wanted,) = torch.autograd.grad(whole.sum(), x)
    monkeypatch.setattr("frugal.codecs.nf4._WIDENED_BYTES", 64 * 64 * 4)
    got = ours(x)
    torch.testing.assert_close(got, whole)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], wanted)


def test_no_dense_weight_and_no_activation_is_kept() -> None:
    ours = NF4Linear.from_linear(nn.Linear(128, 256, bias=False).requires_grad_(False))
    leaf = torch.randn(4, 128, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = ours(leaf)
    owned = {t.untyped_storage().data_ptr() for t in (*ours.parameters(), *ours.buffers())}
    assert {t.untyped_storage().data_ptr() for t in saved} <= owned
    hidden = leaf * 2
    alive = weakref.ref(hidden)
    out = ours(hidden)
    del hidden
    gc.collect()
    assert out.grad_fn is not None
    assert alive() is None  # dX needs W alone


def test_casting_and_copying_change_no_byte() -> None:
    ours = NF4Linear.from_linear(nn.Linear(128, 64).requires_grad_(False))
    before = ours.dequantize()
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), copy.deepcopy):
        assert torch.equal(cast(copy.deepcopy(ours)).dequantize(), before)
    assert ours.half().bias.dtype == torch.float16


def test_state_dict_round_trip() -> None:
    ours = NF4Linear.from_linear(nn.Linear(100, 9).requires_grad_(False))
    assert set(ours.state_dict()) == {"weight", "absmax", "nested_absmax", "offset", "bias"}
    empty = NF4Linear(100, 9)
    empty.load_state_dict(ours.state_dict())
    assert torch.equal(empty.dequantize(), ours.dequantize())
    single = NF4Linear.from_linear(nn.Linear(100, 9, bias=False).requires_grad_(False), double=False)
    assert set(single.state_dict()) == {"weight", "absmax"}


@pytest.mark.parametrize("double", [True, False])
def test_works_under_fake_tensors_and_on_meta(double: bool) -> None:
    with FakeTensorMode():
        ours = NF4Linear(128, 256, double=double)
        x = torch.empty(2, 5, 128, requires_grad=True)
        out = ours(x)
        out.sum().backward()
        assert out.shape == (2, 5, 256)
        assert x.grad is not None
        assert x.grad.shape == (2, 5, 128)
    meta = NF4Linear(128, 256, device="meta", double=double)
    assert meta(torch.empty(2, 128, device="meta")).shape == (2, 256)
    # Real tensors still work afterwards: nothing fake was kept.
    torch.testing.assert_close(
        NF4Linear.from_linear(nn.Linear(64, 64, bias=False), double).dequantize().shape, torch.Size([64, 64])
    )


def test_rows_of_bytes_are_rows_of_the_matrix() -> None:
    """Sharding on dim 0: a slice of the stored tensors dequantises to the same slice of the matrix."""
    nf4 = quantize_nf4(weight(512, 576), double=False)
    half = NF4Tensors(nf4.packed[256:], nf4.absmax[256:], None, None, (256, 576))
    assert torch.equal(dequantize_nf4(half), dequantize_nf4(nf4)[256:])


def test_autocast_and_16_bit() -> None:
    ours = NF4Linear.from_linear(nn.Linear(128, 64).requires_grad_(False))
    x = torch.randn(3, 128)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    leaf = x.to(torch.bfloat16).requires_grad_()
    ours(leaf).float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 64\), expected \(4, 64\)"):
        NF4Linear(64, 4).encode_("weight", torch.zeros(3, 64))
