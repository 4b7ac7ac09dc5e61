"""Rotary position embedding that keeps the angles only and can rotate in place.

The gradient is the gradient rotated back, so neither input nor output is needed in backward (Su et al. 2021). Layout:
halves (transformers' ``rotate_half``: dimension i pairs with i + rotary / 2) or interleaved pairs (2i, 2i + 1).

`rope` is for any tensor. `rope_pair` is for the queries and keys of a layer: in place, also where they are views, and
in one launch on a GPU that has the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops.registry import implements, resolve
from frugal.ops.simulated import sampled

CPU_BLOCK_BYTES = 2**18  # of half the heads of a block of tokens: the five passes over it stay in the cache


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


def _turn_(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """x [batch, heads, tokens, size] in place by cos and sin [1 or batch, tokens, half]; ``back``: the transpose."""
    batch, heads, tokens, _ = x.shape
    half = cos.shape[-1]
    step = max(1, tokens)
    if x.device.type == "cpu":
        step = max(16, CPU_BLOCK_BYTES // max(1, batch * heads * half * x.element_size()))
    cos, sin = cos[:, None], sin[:, None]
    for lo in sampled(range(0, tokens, step), x):
        a, b = x[:, :, lo : lo + step, :half], x[:, :, lo : lo + step, half : 2 * half]
        c, s = cos[:, :, lo : lo + step], sin[:, :, lo : lo + step]
        crossed = a * s
        a.mul_(c).addcmul_(b, s, value=1 if back else -1)
        b.mul_(c).add_(crossed, alpha=-1 if back else 1)


TurnPair: TypeAlias = Callable[[Tensor, Tensor | None, Tensor, Tensor, bool], None]
"""Rotates q and k in place; backward with True."""


@implements("rope", "torch")
def _turn_pair_(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, back: bool) -> None:
    _turn_(q, cos, sin, back)
    if k is not None:
        _turn_(k, cos, sin, back)


class _RopePair(torch.autograd.Function):
    """What is returned lies in the memory of the inputs, which autograd is not told: it would copy the whole tensor
    that a view belongs to. The inputs' version counters do rise: a backward that kept them fails, it is not wrong.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turn: TurnPair) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.turn = turn
        q, k = q.detach(), k.detach()
        turn(q, k, cos, sin, False)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # The incoming gradients may belong to somebody else: turn copies.
        dq, dk = (_copy(grad) for grad in outputs)
        ctx.turn(dq, dk, cos, sin, True)
        return dq, dk, None, None, None


class _RopeJoint(torch.autograd.Function):
    """As `_RopePair` for the first ``heads`` heads of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int, turn: TurnPair) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.turn = heads, turn
        x = x.detach()
        turn(x[:, :heads], None, cos, sin, False)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        dx = _copy(outputs[0])
        cos, sin = ctx.saved_tensors
        ctx.turn(dx[:, : ctx.heads], None, cos, sin, True)
        return dx, None, None, None, None


def _copy(grad: Tensor) -> Tensor:
    """A copy in the same layout, with heads in one piece (an expanded gradient has strides of 0)."""
    copy = grad.clone()
    return copy if copy.stride(-1) == 1 else copy.contiguous()


def _check_overwritten(*tensors: Tensor) -> None:
    if any(t.requires_grad and t.is_leaf for t in tensors):
        raise ValueError("rope overwrites its input in place: a leaf that requires grad cannot be given")


def rope_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """q [batch, heads, tokens, size] and k [batch, kv_heads, tokens, size] rotated in place (halves layout).

    ``cos`` and ``sin`` [1 or batch, tokens, rotary / 2] serve both halves (transformers' tables repeat them:
    pass [..., : rotary // 2]). Allowed where autograd has not kept q and k, as outputs of linear layers or norms, or
    views of them; and where nobody reads them afterwards. Views of one tensor: `rope_joint`.
    """
    _check_overwritten(q, k)
    turned: tuple[Tensor, Tensor] = _RopePair.apply(q, k, cos, sin, resolve("rope", q, implementation)[0])
    return turned


def rope_joint(x: Tensor, heads: int, cos: Tensor, sin: Tensor, *, implementation: str | None = None) -> Tensor:
    """The first ``heads`` heads of x [batch, all heads, tokens, size] as in `rope_pair`: q and k of a joint layer.

    The tensor is split afterwards: autograd would have to make views of a tensor that changed anew.
    """
    _check_overwritten(x)
    turned: Tensor = _RopeJoint.apply(x, cos, sin, heads, resolve("rope", x, implementation)[0])
    return turned
