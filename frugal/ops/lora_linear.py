"""Linear layer with a low-rank update that keeps its input and nothing else.

y = x W^T + bias + scale * (dropout(x) A^T) B^T. x is kept only if A, B or W is trained, and it is the caller's own
tensor: q, k and v (gate and up) share one. x A^T is computed again in backward (r / in_features of a product), and a
quantised W is dequantised again, block by block. Dropout keeps its mask (one byte an element). DoRA is left to PEFT.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops.projection import (
    N_TENSORS,
    Lora,
    LoraMatmul,
    Projection,
    ProjectionGrads,
    projection_reference,
    under_autocast,
)
from frugal.ops.registry import implements, resolve
from frugal.ops.weights import Weight


def lora_linear_reference(
    x: Tensor, weight: Weight, *, bias: Tensor | None = None, lora: Lora | None = None, dropout: float = 0.0
) -> Tensor:
    """The definition. Arguments as in `lora_linear`."""
    dropped = F.dropout(x, dropout) if dropout and lora is not None else None
    return projection_reference(x, Projection(weight, bias, lora), dropped)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, a: Tensor | None, b: Tensor | None,
                p: Projection, dropout: float) -> Tensor:  # fmt: skip
        ctx.p, ctx.dropout = p.frozen(), dropout
        needs = ctx.needs_input_grad
        mask = None
        dropped = None
        if dropout:
            # Drawn as torch.nn.functional.dropout draws it, so that a seed means the same as in PEFT's layer.
            noise = F.dropout(torch.ones_like(x), dropout)
            dropped, mask = x * noise, noise != 0
        run = LoraMatmul(p, x.dtype, x.device, x.shape[0], dropped=bool(dropout))
        y = run.forward(x, x.new_empty(x.shape[0], p.out_features), dropped)
        kept = x if any(needs[i] for i in (1, 3, 4)) else None
        ctx.save_for_backward(kept, mask, weight, bias, a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        (dy,) = outputs
        x, mask, *tensors = ctx.saved_tensors
        p = ctx.p.rebuilt(tuple(tensors))
        needs = ctx.needs_input_grad
        dy = dy.contiguous()
        run = LoraMatmul(p, dy.dtype, dy.device, dy.shape[0], dropped=bool(ctx.dropout))
        keep = None if mask is None else mask.to(dy.dtype).div_(1 - ctx.dropout)
        grads = ProjectionGrads.zeros(p, needs[1 : 1 + N_TENSORS])
        du = run.own_grads(x, dy, grads, None if keep is None or x is None else x * keep)
        dx = None
        if needs[0]:
            dx = run.input_grad(dy, dy.new_empty(dy.shape[0], p.in_features), True, keep, du)
        return (dx, *grads.like(p), None, None)


def lora_linear(
    x: Tensor, weight: Weight, *, bias: Tensor | None = None, lora: Lora | None = None, dropout: float = 0.0
) -> Tensor:
    """x [..., in_features] -> [..., out_features] in x's dtype (autocast's where it is on).

    ``weight`` [out_features, in_features] is dense (any float dtype; frozen or trained) or quantised; ``lora`` is
    (A [r, in_features], B [out_features, r], scale) with scale = alpha / r, or alpha / sqrt(r) for rsLoRA. ``dropout``
    is the probability in force (0 in evaluation). Gradients of A, B, W and bias come in their own dtype.
    """
    if x.shape[-1] != int(weight.shape[1]):
        raise ValueError(f"x has {x.shape[-1]} features, the weight takes {int(weight.shape[1])}")
    x, quiet = under_autocast(x)
    p = Projection(weight, bias, lora)
    flat = x.reshape(-1, x.shape[-1])
    run, _ = resolve("lora_linear", flat)
    with quiet:
        y: Tensor = run(flat, p, dropout if lora is not None else 0.0)
    return y.view(*x.shape[:-1], p.out_features)


@implements("lora_linear", "torch")
def _by_torch(x: Tensor, p: Projection, dropout: float) -> Tensor:
    y: Tensor = _LoraLinear.apply(x, *p.tensors(), p, dropout)
    return y
