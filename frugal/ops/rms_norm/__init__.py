"""RMSNorm that keeps its input and a number a row.

Stock RMSNorm in torch operations keeps the fp32 copy, its square's mean, the normalised value and the 16-bit copy; here
x and 1 / rms are kept. Statistics and products are fp32 (fp64 for fp64), rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops.registry import implements, resolve
from frugal.ops.simulated import sampled

BLOCK_BYTES = 2 * 2**20  # rows worked on at a time: temporaries stay in the cache


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """The definition: x / sqrt(mean(x^2) + eps) * (offset + weight), in fp32, rounded once."""
    acc = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(acc)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * (weight.to(acc) + offset)).to(x.dtype)


def _blocks(n_rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // max(1, 4 * columns))
    return [(lo, min(lo + step, n_rows)) for lo in range(0, n_rows, step)]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        acc = torch.promote_types(x.dtype, torch.float32)
        scale = None if weight is None else weight.to(acc) + offset
        y = torch.empty_like(x)
        rstd = x.new_empty(x.shape[0], 1, dtype=acc)
        for lo, hi in sampled(_blocks(*x.shape), x):
            wide = x[lo:hi].to(acc)
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            rstd[lo:hi] = norm.square_().div_(x.shape[1]).add_(eps).rsqrt_()
            product = wide * rstd[lo:hi]
            y[lo:hi] = product if scale is None else product.mul_(scale)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = outputs
        x, weight, rstd = ctx.saved_tensors
        acc = rstd.dtype
        scale = None if weight is None else weight.to(acc) + ctx.offset
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=acc) if weight is not None and ctx.needs_input_grad[1] else None
        for lo, hi in sampled(_blocks(*x.shape), x):
            r, g = rstd[lo:hi], dy[lo:hi].to(acc)
            normed = x[lo:hi].to(acc) * r
            if dw is not None:
                dw += (g * normed).sum(0)
            if dx is not None:
                g = g * r if scale is None else (g * scale).mul_(r)
                # dx = r (g' - x^ mean(g' x^)) with g' = dy (offset + w), x^ = x r; r is inside g already
                dot = (g * normed).mean(-1, keepdim=True)
                dx[lo:hi] = g.sub_(normed.mul_(dot))
        return dx, None if dw is None or weight is None else dw.to(weight.dtype), None, None


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, implementation: str | None = None
) -> Tensor:
    """RMSNorm over the last axis of x [..., hidden_size] in x's dtype (Zhang and Sennrich 2019).

    ``weight`` [hidden_size] or None; ``offset`` 1 where the family stores weight - 1 (Gemma).
    """
    flat = x.reshape(-1, x.shape[-1])
    run, _ = resolve("rms_norm", flat, implementation, columns=flat.shape[1])
    y: Tensor = run(flat, weight, eps, offset)
    return y.view(x.shape)


@implements("rms_norm", "torch")
def _by_torch(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    y: Tensor = _RmsNorm.apply(x, weight, eps, offset)
    return y


@implements("rms_norm", "reference")
def _by_definition(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    return rms_norm_reference(x, weight, eps, offset=offset)
