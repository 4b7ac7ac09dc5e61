"""Rotary position embedding of queries and keys, in place, in one launch; any number of heads on either side.

(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of the rotated part of a head; what lies behind it (partial
rotation) is not touched. Backward is the same with -sin. Cosines and sines are read once a token for all heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.launch import Launch, next_power_of_2, tile
from frugal.ops.registry import implements


@triton.jit
def rotate_heads(X, heads, stride_head, half, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Heads of one token at X, in place."""
    lane = tl.arange(0, HALF)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        at = X + head.to(tl.int64)[:, None] * stride_head + lane[None, :]
        mask = (head[:, None] < heads) & (lane[None, :] < half)
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (a * cos[None, :] - b * sin[None, :]).to(X.dtype.element_ty), mask=mask)
        tl.store(at + half, (b * cos[None, :] + a * sin[None, :]).to(X.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    Q, K, COS, SIN, tokens, q_heads, k_heads, half,
    q_batch, q_head, q_token, k_batch, k_head, k_token, c_batch, c_token,
    BACKWARD: tl.constexpr, HAS_K: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) % tokens).to(tl.int64)
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    lane = tl.arange(0, HALF)
    at = batch * c_batch + token * c_token + lane
    cos = tl.load(COS + at, mask=lane < half, other=0.0).to(tl.float32)
    sin = tl.load(SIN + at, mask=lane < half, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    rotate_heads(Q + batch * q_batch + token * q_token, q_heads, q_head, half, cos, sin, HEADS, HALF)
    if HAS_K:
        rotate_heads(K + batch * k_batch + token * k_token, k_heads, k_head, half, cos, sin, HEADS, HALF)


def prepare_rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, backward: bool = False, target: str | None = None
) -> Launch:
    """Rotate ``q`` [batch, heads, tokens, size] and ``k`` [batch, kv_heads, tokens, size] in place; any strides but 1
    in the last dimension.

    ``cos`` and ``sin`` are [batch or 1, tokens, half] or wider: the first ``half`` columns are read, where the rotated
    part of a head is twice that. Pass [..., :rotary // 2] of transformers' tables, whose halves are equal.
    """
    batch, q_heads, tokens, size = q.shape
    half = cos.shape[-1]
    if 2 * half > size or cos.shape != sin.shape or cos.stride() != sin.stride():
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be alike, at most half of {size} wide"
        )
    if cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
        raise ValueError(f"cos [1 or {batch}, {tokens}, half] expected, got {tuple(cos.shape)}")
    if any(t is not None and t.stride(-1) != 1 for t in (q, k, cos, sin)):
        raise ValueError("rope: the last dimension must be contiguous")
    if k is not None and (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, size):
        raise ValueError(f"k {tuple(k.shape)} does not fit q {tuple(q.shape)}")
    other = q if k is None else k
    sizes = tile("rope", q.dtype, q.device, target)
    block = next_power_of_2(half)
    heads = max(1, min(next_power_of_2(q_heads), sizes.pop("TILE") // block))
    return Launch(
        rope_kernel,
        (batch * tokens,),
        (q, k, cos, sin, tokens, q_heads, other.shape[1], half, *(q.stride(i) for i in (0, 1, 2)),
         *(other.stride(i) for i in (0, 1, 2)), cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)),
        {"BACKWARD": backward, "HAS_K": k is not None, "HEADS": heads, "HALF": block},
        sizes,
    )  # fmt: skip


def rope_(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, backward: bool = False) -> None:
    """Run `prepare_rope`: ``q`` and ``k`` are rotated in place."""
    prepare_rope(q, k, cos, sin, backward=backward).run()


@implements("rope", "triton")
def _turn_pair_(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, back: bool) -> None:
    rope_(q, k, cos, sin, backward=back)
    torch.autograd.graph.increment_version([t for t in (q, k) if t is not None])
