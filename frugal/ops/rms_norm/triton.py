"""RMSNorm, forward and backward: y = x / sqrt(mean(x^2) + eps) * (weight + offset), one pass over each row.

Everything is computed in float32 and rounded once. The reciprocal of the root is made again in backward from the row,
which is read there anyway, so nothing but x is kept. A program takes several rows, so that the weight is read once for
all of them: x and y (backward: dy, x, dx) are all the traffic that counts. Gradients of the weight are summed in a
fixed order (partial sums by program), no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops.launch import Launch, cdiv, next_power_of_2, tile
from frugal.ops.registry import implements
from frugal.ops.rows import MAX_NORM_COLUMNS

_PROGRAMS = 512  # about what fills a GPU: fewer rows a program below that
_PARTIAL_SUMS = 256  # rows of partial sums of the weight's gradient, which are written and read again


@triton.jit
def rms_norm_kernel(
    X, WEIGHT, OUT, stride_x, stride_out, rows, columns, eps, offset,
    HAS_WEIGHT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < columns
    if HAS_WEIGHT:
        weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32) + offset
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        x = tl.load(X + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)
        y = x * rstd[:, None]
        if HAS_WEIGHT:
            y = y * weight[None, :]
        tl.store(OUT + row[:, None] * stride_out + column[None, :], y.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    DY, X, WEIGHT, DX, PARTIAL, stride_dy, stride_x, stride_dx, rows, columns, eps, offset,
    HAS_WEIGHT: tl.constexpr, WEIGHT_GRAD: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < columns
    if HAS_WEIGHT:
        weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        x = tl.load(X + row[:, None] * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row[:, None] * stride_dy + column[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)
        normed = x * rstd[:, None]
        if WEIGHT_GRAD:
            total += tl.sum(dy * normed, 0)
        if HAS_WEIGHT:
            dy = dy * weight[None, :]
        mean = tl.sum(dy * normed, 1) / columns
        dx = rstd[:, None] * (dy - normed * mean[:, None])
        tl.store(DX + row[:, None] * stride_dx + column[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    if WEIGHT_GRAD:
        tl.store(PARTIAL + tl.program_id(0).to(tl.int64) * columns + column, total, mask=inside)


def _shape(kernel: str, x: Tensor, fill: int, target: str | None) -> tuple[int, dict[str, int], dict[str, int]]:
    """(programs, constants, options) for ``x`` [rows, columns], with about ``fill`` programs if there are the rows."""
    rows, columns = x.shape
    if columns > MAX_NORM_COLUMNS:
        raise ValueError(f"rms_norm: rows of at most {MAX_NORM_COLUMNS} columns, got {columns}")
    if x.stride(1) != 1 and columns > 1:
        raise ValueError("rms_norm: columns must lie side by side")
    sizes = tile(kernel, x.dtype, x.device, target)
    block = next_power_of_2(columns)
    at_once = max(1, sizes.pop("TILE") // block)
    steps = max(1, min(32, next_power_of_2(cdiv(rows, at_once * fill))))
    sizes["num_warps"] = max(sizes["num_warps"], min(16, block // 1024))
    return cdiv(rows, at_once * steps), {"STEPS": steps, "ROWS": at_once, "BLOCK": block}, sizes


def prepare_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, out: Tensor, target: str | None = None
) -> Launch:
    """``out`` [rows, columns] = RMSNorm of ``x``; ``weight`` [columns] or None; ``offset`` is 1 for Gemma's norms."""
    programs, constants, options = _shape("rms_norm", x, _PROGRAMS, target)
    return Launch(
        rms_norm_kernel,
        (programs,),
        (x, weight, out, x.stride(0), out.stride(0), x.shape[0], x.shape[1], float(eps), float(offset)),
        {"HAS_WEIGHT": weight is not None, **constants},
        options,
    )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """RMSNorm of ``x`` [rows, columns] in its dtype. ``out`` may be ``x``."""
    out = torch.empty_like(x) if out is None else out
    prepare_rms_norm(x, weight, eps, offset, out).run()
    return out


def prepare_rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, dx: Tensor, weight_grad: bool,
    target: str | None = None,
) -> tuple[Launch, Tensor | None]:  # fmt: skip
    """The launch, and the partial sums [programs, columns] of the weight's gradient that it fills, float32."""
    programs, constants, options = _shape("rms_norm_backward", x, _PARTIAL_SUMS if weight_grad else _PROGRAMS, target)
    partial = None
    if weight_grad:
        partial = torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
    launch = Launch(
        rms_norm_backward_kernel,
        (programs,),
        (dy, x, weight, dx, partial, dy.stride(0), x.stride(0), dx.stride(0), x.shape[0], x.shape[1], float(eps),
         float(offset)),
        {"HAS_WEIGHT": weight is not None, "WEIGHT_GRAD": weight_grad, **constants},
        options,
    )  # fmt: skip
    return launch, partial


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    *,
    weight_grad: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``x`` (in its dtype; ``out`` may be ``dy``) and, if asked for, of ``weight`` (float32)."""
    dx = torch.empty_like(x) if out is None else out
    launch, partial = prepare_rms_norm_backward(dy, x, weight, eps, offset, dx, weight_grad and weight is not None)
    launch.run()
    return dx, None if partial is None else partial.sum(0)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm of x [rows, columns]; keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return rms_norm(x, weight, eps, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = outputs
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1] and weight is not None
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dx, dw = rms_norm_backward(dy, x, weight, ctx.eps, ctx.offset, weight_grad=wanted)
        return dx, dw if dw is None else dw.to(weight.dtype), None, None


@implements("rms_norm", "triton")
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    y: Tensor = _RmsNorm.apply(x, weight, eps, offset)
    return y
