"""RMSNorm forward and backward against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from frugal.ops.launch import Launch
from frugal.ops.rms_norm.triton import prepare_rms_norm, rms_norm, rms_norm_backward
from tests.kernels.support import checked, close_to_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-3  # large enough that leaving it out shows


def stock(x: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    """As transformers' layers compute it: float32 inside, rounded to the input's dtype before the weight."""
    acc = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(acc)
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return y if weight is None else (y * (weight.to(acc) + offset).to(x.dtype)).to(x.dtype)


def inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight = torch.rand(columns, generator=generator) + 0.5
    dy = torch.randn(rows, columns, generator=generator)
    return x.to(dtype), weight.to(dtype), dy.to(dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "tile"), [(5, 96, 2048), (33, 100, 256), (4, 2048, 2048), (3, 1, 4)])
def test_forward(rows: int, columns: int, tile: int, dtype: torch.dtype, offset: float) -> None:
    x, weight, _ = inputs(rows, columns, dtype)
    for w in (weight, None):
        with checked():
            out = torch.empty_like(x)
            launch = with_tile(prepare_rms_norm(x, w, EPS, offset, out), rows, columns, tile, steps=3)
            launch.run()
        exact = stock(x.double(), None if w is None else w.double(), offset)
        close_to_exact(out, exact, stock(x, w, offset))


def with_tile(launch: Launch, rows: int, columns: int, tile: int, steps: int) -> Launch:
    block = launch.constants["BLOCK"]
    at_once = max(1, tile // block)
    constants = {**launch.constants, "ROWS": at_once, "STEPS": steps}
    return Launch(launch.kernel, (-(rows // -(at_once * steps)),), launch.args, constants, launch.options)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(37, 96), (5, 1000)])
def test_backward(rows: int, columns: int, dtype: torch.dtype, offset: float) -> None:
    x, weight, dy = inputs(rows, columns, dtype)
    for w in (weight, None):
        with checked():
            dx, dw = rms_norm_backward(dy, x, w, EPS, offset, weight_grad=w is not None)
        exact = gradients(x.double(), None if w is None else w.double(), dy.double(), offset)
        naive = gradients(x, w, dy, offset)
        close_to_exact(dx, exact[0], naive[0])
        assert (dw is None) == (w is None)
        if dw is not None:
            assert dw.dtype == torch.float32
            close_to_exact(dw, exact[1], gradients(x.float(), weight.float(), dy.float(), offset)[1], slack=8.0)


def gradients(x: Tensor, weight: Tensor | None, dy: Tensor, offset: float) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    leaves = [x] if weight is None else [x, weight.clone().requires_grad_()]
    return torch.autograd.grad(stock(x, None if weight is None else leaves[1], offset), leaves, dy)


def test_backward_without_the_weights_gradient_and_over_dy() -> None:
    x, weight, dy = inputs(6, 64, torch.float32)
    with checked():
        expected, _ = rms_norm_backward(dy, x, weight, EPS)
        got, dw = rms_norm_backward(dy, x, weight, EPS, out=dy)
    assert got is dy
    assert dw is None
    assert torch.equal(got, expected)


def test_rows_with_gaps_and_in_place() -> None:
    x, weight, _ = inputs(7, 64, torch.float32)
    wide = torch.full((7, 100), 7.0)
    wide[:, :64] = x
    with checked():
        got = rms_norm(wide[:, :64], weight, EPS, out=wide[:, :64])
    close_to_exact(got, stock(x.double(), weight.double(), 0.0), stock(x, weight, 0.0))
    assert (wide[:, 64:] == 7.0).all()


def test_rows_that_are_too_long() -> None:
    with pytest.raises(ValueError, match="at most 8192 columns, got 10000"):
        rms_norm(torch.zeros(1, 10000), None, EPS)


def test_no_rows() -> None:
    with checked() as report:
        assert rms_norm(torch.zeros(0, 64), None, EPS).shape == (0, 64)
    assert report.launches == []
