"""Rotary embedding of q and k in place against transformers' formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from frugal.ops.rope.triton import rope_
from tests.kernels.support import checked, close_to_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tables(batch: int, tokens: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens) + 3 * torch.arange(batch)[:, None]
    angle = positions[..., None] * 100.0 ** (-torch.arange(half) / half)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def stock(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin over the rotated part, as transformers' models compute it."""
    half = cos.shape[-1]
    cos, sin = (torch.cat([t, t], -1)[:, None].to(x.dtype) for t in (cos, sin))
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([-part[..., half:], part[..., :half]], -1)
    return torch.cat([part * cos + rotated * sin, rest], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "q_heads", "k_heads", "tokens", "size", "half", "table_batch"),
    [(2, 4, 2, 5, 32, 16, 2), (2, 3, 1, 4, 24, 12, 1), (1, 5, 5, 3, 40, 10, 1), (2, 9, 3, 2, 64, 32, 2)],
)
def test_both_directions(
    batch: int, q_heads: int, k_heads: int, tokens: int, size: int, half: int, table_batch: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    # Token by token, as projections write them; heads are a transposed view.
    q = torch.randn(batch, tokens, q_heads, size, generator=generator).to(dtype).transpose(1, 2)
    k = torch.randn(batch, tokens, k_heads, size, generator=generator).to(dtype).transpose(1, 2)
    cos, sin = tables(table_batch, tokens, half, dtype)
    before = q.clone(), k.clone()
    with checked():
        rope_(q, k, cos, sin)
    for got, x in zip((q, k), before, strict=True):
        close_to_exact(got, stock(x.double(), cos.double(), sin.double()), stock(x, cos, sin))
        assert torch.equal(got[..., 2 * half :], x[..., 2 * half :])
    rotated = q.clone(), k.clone()
    with checked():
        rope_(q, k, cos, sin, backward=True)
    for got, x in zip((q, k), rotated, strict=True):
        close_to_exact(got, stock(x.double(), cos.double(), -sin.double()), stock(x, cos, -sin))


def test_one_tensor_and_halves_of_wider_tables() -> None:
    q = torch.randn(1, 2, 4, 16)
    cos, sin = tables(1, 4, 8, torch.float32)
    wide_cos, wide_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    expected = stock(q.double(), cos.double(), sin.double())
    with checked() as report:
        rope_(q, None, wide_cos[..., :8], wide_sin[..., :8])
    close_to_exact(q, expected)
    assert report.launches == ["rope_kernel"]


def test_shapes_that_do_not_fit() -> None:
    q, k = torch.zeros(1, 2, 4, 16), torch.zeros(1, 1, 5, 16)
    cos = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="does not fit"):
        rope_(q, k, cos, cos)
    with pytest.raises(ValueError, match="at most half"):
        rope_(q, None, torch.zeros(1, 4, 9), torch.zeros(1, 4, 9))
    with pytest.raises(ValueError, match="1 or 1, 4, half"):
        rope_(q, None, torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))
