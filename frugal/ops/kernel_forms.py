"""Triton forms of operations that memory traffic bounds. Kernels are imported when a call first takes one: the package
works without Triton."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.codecs.nf4 import NF4Tensors
from frugal.codecs.nf4_codes import BLOCK, nested_code, nf4_code
from frugal.ops.registry import implements


def kernels(module: str) -> Any:
    """A module of frugal.kernels; it imports Triton."""
    return importlib.import_module(f"frugal.kernels.{module}")


class RmsNorm(torch.autograd.Function):
    """RMSNorm of x [rows, columns]; keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        y: Tensor = kernels("rms_norm").rms_norm(x, weight, eps, offset)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = outputs
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1] and weight is not None
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dx, dw = kernels("rms_norm").rms_norm_backward(dy, x, weight, ctx.eps, ctx.offset, weight_grad=wanted)
        return dx, dw if dw is None else dw.to(weight.dtype), None, None


@implements("nf4_rows", "triton")
def nf4_rows(weight: NF4Tensors, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows ``start`` to ``stop`` of an NF4 matrix in one launch (bitsandbytes takes three to five)."""
    columns = weight.shape[1]
    first, last = start * columns, min(stop, weight.shape[0]) * columns
    aligned = first // BLOCK * BLOCK
    flat: Tensor = kernels("nf4").dequantize(_parts(weight), aligned, last, dtype)
    return flat[first - aligned :].view(-1, columns)


@implements("nf4_rows_with_update", "triton")
def nf4_rows_with_update(
    weight: NF4Tensors, start: int, stop: int, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """Rows ``start`` to ``stop`` of W + scale * B A in one pass; columns must be a multiple of 64."""
    out = torch.empty(min(stop, weight.shape[0]) - start, weight.shape[1], dtype=dtype, device=weight.packed.device)
    merged: Tensor = kernels("nf4").dequantize_lora(_parts(weight), a, b, scale, start, out)
    return merged


def _parts(weight: NF4Tensors) -> Any:
    device = weight.packed.device
    nested = None if weight.nested_absmax is None else nested_code(device)
    return kernels("nf4").Nf4Parts(
        weight.packed, weight.absmax, weight.nested_absmax, weight.offset, nf4_code(device), nested
    )
