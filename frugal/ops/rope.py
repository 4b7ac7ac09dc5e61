"""Rotary position embedding that keeps the angles only and can rotate in place.

The gradient is the gradient rotated back, so neither input nor output is needed in backward (Su et al. 2021). Layout:
halves (transformers' ``rotate_half``: dimension i pairs with i + rotary / 2) or interleaved pairs (2i, 2i + 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _halves(t: Tensor, rotary: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two members of each pair."""
    part = t[..., :rotary]
    return (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., : rotary // 2], part[..., rotary // 2 :])


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """The definition: (a, b) -> (a cos - b sin, b cos + a sin) for each pair, other dimensions as they are."""
    rotary = cos.shape[-1]
    a, b = _halves(x, rotary, interleaved)
    cos_a, cos_b = _halves(cos, rotary, interleaved)
    sin_a, sin_b = _halves(sin, rotary, interleaved)
    first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    pairs = torch.stack((first, second), dim=-1 if interleaved else -2)
    turned = pairs.flatten(-2)
    return torch.cat((turned, x[..., rotary:]), dim=-1).to(x.dtype)


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotates x in place; ``back`` applies the transpose. One temporary of half the size."""
    rotary = cos.shape[-1]
    a, b = _halves(x, rotary, interleaved)
    cos_a, cos_b = _halves(cos, rotary, interleaved)
    sin_a, sin_b = _halves(sin, rotary, interleaved)
    old_a = a.clone()
    if back:
        a.mul_(cos_a).addcmul_(b, sin_b)
        b.mul_(cos_b).addcmul_(old_a, sin_a, value=-1)
    else:
        a.mul_(cos_a).addcmul_(b, sin_a, value=-1)
        b.mul_(cos_b).addcmul_(old_a, sin_b)
    return x


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, in_place: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        if in_place:
            ctx.mark_dirty(x)
            return _rotate_(x, cos, sin, interleaved, False)
        return _rotate_(x.clone(), cos, sin, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # The incoming gradient may belong to somebody else: rotate a copy.
        return _rotate_(outputs[0].clone(), cos, sin, ctx.interleaved, True), None, None, None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, in_place: bool = False) -> Tensor:
    """x [..., tokens, head_size] rotated by angles with cos and sin [..., tokens, rotary] (rotary <= head_size).

    cos and sin broadcast against x's leading axes and get no gradient. ``in_place`` overwrites x and returns it:
    allowed where autograd has not kept x (the output of a linear layer); a leaf that requires grad is copied instead.
    """
    if in_place and x.requires_grad and x.is_leaf:
        in_place = False
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    y: Tensor = _Rope.apply(x, cos, sin, interleaved, in_place)
    return y
