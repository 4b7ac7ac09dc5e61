"""torch's scaled_dot_product_attention, document by document, held to the kernels that build no [S, S] scores.

On CUDA two qualify: flash (compute capability 8.0 and later, 16 bits) and memory-efficient (all). They are called as
the operations behind torch's function, so that backward can give them a few key heads at a time and put gradients of
documents and heads where they belong instead of adding padded ones. The memory-efficient kernel does not know grouped
queries: asked with ``enable_gqa`` torch would silently take the mathematical form with all scores. So groups are given
to it as a batch, keys and values with a stride of 0: views, nothing is copied forward. Elsewhere (no CUDA, no CPU)
torch's function chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.device import Device, describe

Segment = tuple[int, int, int, int]
_ATEN = torch.ops.aten
# Outside of its result a vendor's kernel holds in backward, for every query head it is given, dQ in fp32 and its own dK
# and dV (torch's flash and memory-efficient kernels do, whatever the number of key heads), and here copies of the
# group's output and gradient: about 12 bytes for every element of q in 16 bits. Heads do not depend on each other, so
# calls with a few at a time give the same numbers, bit for bit, out of a workspace that stays small.
WORKSPACE_BYTES = 64 * 2**20  # of one call: at 4,096 tokens still 8 query heads of 128, enough to fill a GPU


def key_heads_at_once(rows: int, tokens: int, groups: int, size: int, itemsize: int, kv_heads: int) -> int:
    """Key heads of one call, each with ``groups`` query heads; at least one, and calls are evened out."""
    each = rows * tokens * groups * size * (4 + 4 * itemsize)
    most = max(1, min(kv_heads, WORKSPACE_BYTES // max(1, each)))
    calls = -(kv_heads // -most)
    return -(kv_heads // -calls)


def head_ranges(kv_heads: int, at_once: int) -> list[tuple[int, int]]:
    """Ranges of key heads, one a call."""
    return [(lo, min(lo + at_once, kv_heads)) for lo in range(0, kv_heads, at_once)]


def takes_flash(target: Device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether torch's flash backend serves a CUDA ``target``."""
    half = dtype in (torch.float16, torch.bfloat16)
    return half and head_size <= 256 and head_size % 8 == 0 and not target.older_than((8, 0))


def grouped_as_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hkv * G, S, D] as [B * Hkv, G, S, D]; k and v [B, Hkv, S, D] as [B * Hkv, G, S, D] with G of stride 0.

    With B = 1, a packed batch, all three are views.
    """
    batch, heads, tokens, size = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    queries = q.reshape(batch * kv_heads, groups, tokens, size)
    keys, values = (
        t.reshape(batch * kv_heads, 1, tokens, size).expand(-1, groups, -1, -1) for t in (k, v)
    )  # fmt: skip
    return queries, keys, values


@dataclass(frozen=True)
class Kernel:
    """One kernel: ``forward(q, k, v, scale, causal)`` gives out and what its backward needs besides, log-sum-exp
    first; ``backward(d_out, q, k, v, out, state, scale, causal)`` gives dq, dk, dv. Both take grouped queries."""

    forward: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, tuple[Any, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, tuple[Any, ...]]:
    out, lse, _, _, _, _, seed, offset, _ = _ATEN._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, (lse, seed, offset)


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...], scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse, seed, offset = state
    tokens = q.shape[2]
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward.default(
        d_out, q, k, v, out, lse, None, None, tokens, tokens, 0.0, causal, seed, offset, scale=scale
    )
    return dq, dk, dv


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, tuple[Any, ...]]:
    out, lse, seed, offset = _ATEN._scaled_dot_product_efficient_attention.default(
        *grouped_as_batch(q, k, v), None, True, 0.0, causal, scale=scale
    )
    # the log-sum-exp is padded to whole blocks of queries; heads one after the other, as the caller slices them
    return out.reshape(q.shape), (lse.view(q.shape[0], q.shape[1], -1), seed, offset)


def _efficient_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...], scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse, seed, offset = state
    queries, keys, values = grouped_as_batch(q, k, v)
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward.default(
        d_out.reshape(queries.shape), queries, keys, values, None, out.reshape(queries.shape),
        lse.reshape(queries.shape[0], queries.shape[1], -1), seed, offset, 0.0, (True, True, True, False), causal,
        scale=scale,
    )  # fmt: skip
    return dq.reshape(q.shape), dk.sum(1).view(k.shape), dv.sum(1).view(v.shape)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, tuple[Any, ...]]:
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)
    return out, (lse,)


def _cpu_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, state: tuple[Any, ...], scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(
        d_out, q, k, v, out, state[0], 0.0, causal, scale=scale
    )
    return dq, dk, dv


FLASH = Kernel(_flash_forward, _flash_backward)
EFFICIENT = Kernel(_efficient_forward, _efficient_backward)
CPU = Kernel(_cpu_forward, _cpu_backward)


def kernel_for(target: Device, dtype: torch.dtype, head_size: int) -> Kernel | None:
    """The kernel that serves ``target``; None where torch's own function is to choose."""
    if target.kind == "cuda":
        return FLASH if takes_flash(target, dtype, head_size) else EFFICIENT
    return CPU if target.kind == "cpu" else None


class _Sdpa(torch.autograd.Function):
    """Attention of every document in ``pieces``. Keeps q, k, v, out and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: list[Segment], kernel: Kernel, scale: float,
                causal: bool) -> Tensor:  # fmt: skip
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        ctx.pieces, ctx.kernel, ctx.scale, ctx.causal = pieces, kernel, scale, causal
        if pieces == [(0, q.shape[0], 0, q.shape[2])]:
            out, state = kernel.forward(q, k, v, scale, causal)
            states = [state]
        else:
            out = _by_token(q, q.shape[1])
            states = []
            for r0, r1, s0, s1 in pieces:
                q_, k_, v_ = (t[r0:r1, :, s0:s1] for t in (q, k, v))
                part, state = kernel.forward(q_, k_, v_, scale, causal)
                out[r0:r1, :, s0:s1] = part
                states.append(state)
        ctx.sizes = [len(state) for state in states]
        ctx.save_for_backward(q, k, v, out, *(t for state in states for t in state))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = outputs
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        q, k, v, out, *rest = ctx.saved_tensors
        grads = (_by_token(q, q.shape[1]), _by_token(k, k.shape[1]), _by_token(v, k.shape[1]))
        groups = q.shape[1] // k.shape[1]
        for (r0, r1, s0, s1), count in zip(ctx.pieces, ctx.sizes, strict=True):
            lse, *state = rest[:count]
            rest = rest[count:]
            at_once = key_heads_at_once(r1 - r0, s1 - s0, groups, q.shape[3], q.element_size(), k.shape[1])
            for lo, hi in head_ranges(k.shape[1], at_once):
                heads, keys = slice(lo * groups, hi * groups), slice(lo, hi)
                do_, q_, out_ = (t[r0:r1, heads, s0:s1] for t in (d_out, q, out))
                k_, v_ = (t[r0:r1, keys, s0:s1] for t in (k, v))
                parts = ctx.kernel.backward(
                    do_, q_, k_, v_, out_, (lse[:, heads].contiguous(), *state), ctx.scale, ctx.causal
                )
                for grad, part, which in zip(grads, parts, (heads, keys, keys), strict=True):
                    grad[r0:r1, which, s0:s1] = part
                del parts, part
        return (*grads, None, None, None, None)


def _by_token(t: Tensor, heads: int) -> Tensor:
    """Uninitialised [batch, heads, tokens, size] laid out token by token, as the projections read it."""
    return t.new_empty(t.shape[0], t.shape[2], heads, t.shape[3]).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, pieces: list[Segment], scale: float, causal: bool) -> Tensor:
    """Attention of every document in ``pieces``; shapes as in `frugal.ops.attention`."""
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # as torch's own function does
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    kernel = kernel_for(describe(q.device), q.dtype, q.shape[-1])
    if kernel is None:
        return _torchs_own(q, k, v, pieces, scale, causal)
    out: Tensor = _Sdpa.apply(q, k, v, pieces, kernel, scale, causal)
    return out


def _torchs_own(q: Tensor, k: Tensor, v: Tensor, pieces: list[Segment], scale: float, causal: bool) -> Tensor:
    by_row: dict[tuple[int, int], list[Tensor]] = {}
    for r0, r1, s0, s1 in pieces:
        q_, k_, v_ = (t[r0:r1, :, s0:s1] for t in (q, k, v))
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal, scale=scale, enable_gqa=gqa)
        by_row.setdefault((r0, r1), []).append(out)
    return torch.cat([torch.cat(parts, dim=2) for parts in by_row.values()], dim=0)
