"""What attention kernels that only a GPU has allocate, for plans.

Outputs, log-sum-exp and, in backward, what torch's own kernels hold for the heads of one call. Plans run on fake
tensors of torch's meta device (fake CUDA tensors need a CUDA build of torch), which takes every branch that is not the
CPU's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops.attention.sdpa import head_ranges, key_heads_at_once
from frugal.ops.simulated import sampled


class _Attention(torch.autograd.Function):
    """Allocations of a kernel's forward and backward; ``own``: of frugal's packed kernel, else of torch's, which is
    given ``rows`` at a time (0: of flash-attn)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: bool, rows: int) -> Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        batch, heads, tokens, size = q.shape
        out = q.new_empty(batch, tokens, heads, size).transpose(1, 2)
        lse = q.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.own, ctx.rows = own, rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = outputs
        q, k, v, _, lse = ctx.saved_tensors
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        torch.empty_like(lse)  # sum(out * d_out) of each row
        dq, dk, dv = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (q, k, v))
        if ctx.own:
            return dq, dk, dv, None, None
        kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        if not ctx.rows:  # flash-attn's function, for all heads and rows
            workspace = [q.new_empty(q.shape, dtype=torch.float32), *(q.new_empty(q.shape) for _ in range(2))]
            del workspace
            return dq, dk, dv, None, None
        at_once = key_heads_at_once(ctx.rows, q.shape[2], groups, q.shape[3], q.element_size(), kv_heads)
        for lo, hi in sampled(head_ranges(kv_heads, at_once), q):
            _one_call(q[: ctx.rows, lo * groups : hi * groups], k[: ctx.rows, lo:hi])
        return dq, dk, dv, None, None


def _one_call(q: Tensor, k: Tensor) -> None:
    """What torch's flash kernel and its caller allocate in backward for some key heads."""
    parts = [torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)]
    copies = [q.new_empty(q.shape) for _ in range(2)]  # out and its gradient, token by token
    accumulated = q.new_empty(q.shape, dtype=torch.float32)  # dq over blocks of keys
    if q.shape[1] > k.shape[1]:  # dk and dv of every query head, summed over those that share a key head
        parts += [q.new_empty(q.shape) for _ in range(2)]
    del parts, copies, accumulated


def allocate(name: str, q: Tensor, k: Tensor, v: Tensor, documents: int) -> Tensor:
    """Allocations of the kernel of row ``name`` (flash_attn, triton, sdpa) on the GPU that a plan is for."""
    rows = 0 if name == "flash_attn" else 1 if documents > q.shape[0] else q.shape[0]
    out: Tensor = _Attention.apply(q, k, v, name == "triton", rows)
    return out
