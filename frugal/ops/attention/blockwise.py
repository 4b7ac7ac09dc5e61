"""One document of attention by blocks of queries and keys with an online softmax: any device, soft cap and window.

Scores exist one [block, block] tile at a time and are computed again in backward from the saved log-sum-exp, as in
FlashAttention-2 (Dao 2023, algorithms 1 and 2), here in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from frugal.ops.simulated import sampled

CPU_BLOCK, BLOCK = 128, 512  # queries and keys of a tile: in the cache on a CPU, few launches elsewhere
LOG2E = 1.4426950408889634  # scores are kept in powers of two: on CPUs exp2 is fast for every argument, exp is not


def _grouped(t: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, n, D] -> [B, Hkv, groups * n, D]: the queries that share a key head side by side."""
    batch, heads, n, size = t.shape
    return t.reshape(batch, kv_heads, heads // kv_heads * n, size)


def _block(q: Tensor) -> int:
    return CPU_BLOCK if q.device.type == "cpu" else BLOCK


def _key_blocks(
    lo: int, hi: int, tokens: int, window: int | None, causal: bool, step: int
) -> Iterator[tuple[int, int]]:
    first = 0 if window is None else max(0, lo - window + 1)
    last = hi if causal else tokens
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _hidden_pairs(lo: int, hi: int, start: int, stop: int, window: int | None, causal: bool,
                  groups: int, device: torch.device) -> Tensor | None:  # fmt: skip
    """True where query lo..hi must not see key start..stop: [groups * (hi - lo), stop - start]; None if nowhere."""
    right = causal and stop - 1 > lo
    left = window is not None and (hi - 1) - start >= window
    if not right and not left:
        return None
    i = torch.arange(lo, hi, device=device)[:, None]
    j = torch.arange(start, stop, device=device)[None, :]
    hidden = (j > i) if right else torch.zeros(hi - lo, stop - start, dtype=torch.bool, device=device)
    if left and window is not None:
        hidden = hidden | (i - j >= window)
    return hidden.repeat(groups, 1)


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """log2(e) times the capped scores."""
    s = torch.matmul(q, k.transpose(-1, -2))
    return s.mul_(scale * LOG2E) if softcap is None else s.mul_(scale / softcap).tanh_().mul_(softcap * LOG2E)


def blockwise_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, D] in q's dtype and log-sum-exp [B, Hq, S] in fp32 (fp64 for fp64 input)."""
    batch, heads, tokens, size = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    acc = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, tokens, heads, size).transpose(1, 2)
    lse = q.new_empty(batch, heads, tokens, dtype=acc)
    step = _block(q)
    for lo in sampled(range(0, tokens, step), q):
        hi = min(lo + step, tokens)
        block = _grouped(q[:, :, lo:hi], kv_heads).to(acc)
        top = block.new_full((*block.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(top)
        mixed = torch.zeros_like(block)
        for start, stop in sampled(list(_key_blocks(lo, hi, tokens, window, causal, step)), q):
            s = _scores(block, k[:, :, start:stop].to(acc), scale, softcap)
            hidden = _hidden_pairs(lo, hi, start, stop, window, causal, groups, q.device)
            if hidden is not None:
                s.masked_fill_(hidden, -torch.inf)
            higher = torch.maximum(top, s.amax(-1, keepdim=True))
            # A row may see nothing of this tile: keep its exponentials at 0 instead of 2^(-inf + inf).
            finite = higher.clamp(min=torch.finfo(acc).min)
            shrink = torch.exp2(top - finite)
            s.sub_(finite).exp2_()
            total.mul_(shrink).add_(s.sum(-1, keepdim=True))
            mixed.mul_(shrink).add_(torch.matmul(s, v[:, :, start:stop].to(acc)))
            top = higher
        out[:, :, lo:hi] = mixed.div_(total).view(batch, heads, hi - lo, size).to(q.dtype)
        lse[:, :, lo:hi] = (top + total.log2()).div_(LOG2E).view(batch, heads, hi - lo)
    return out, lse


def blockwise_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, accumulated in fp32 (fp64 for fp64 input) and returned in their dtypes."""
    batch, heads, tokens, size = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    acc = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_empty(batch, tokens, heads, size).transpose(1, 2)
    dk, dv = (t.new_zeros(batch, tokens, kv_heads, size, dtype=acc).transpose(1, 2) for t in (k, v))
    step = _block(q)
    for lo in sampled(range(0, tokens, step), q):
        hi = min(lo + step, tokens)
        block, d_block, o_block = (_grouped(t[:, :, lo:hi], kv_heads).to(acc) for t in (q, d_out, out))
        delta = (d_block * o_block).sum(-1, keepdim=True)
        level = _grouped(lse[:, :, lo:hi, None], kv_heads) * LOG2E
        d_query = torch.zeros_like(block)
        for start, stop in sampled(list(_key_blocks(lo, hi, tokens, window, causal, step)), q):
            keys, values = k[:, :, start:stop].to(acc), v[:, :, start:stop].to(acc)
            s = _scores(block, keys, scale, softcap)
            # d cap(s) / ds = 1 - tanh(s / cap)^2
            slope = None if softcap is None else torch.square(s / (softcap * LOG2E)).neg_().add_(1)
            p = s.sub_(level).exp2_()
            hidden = _hidden_pairs(lo, hi, start, stop, window, causal, groups, q.device)
            if hidden is not None:
                p.masked_fill_(hidden, 0.0)
            dv[:, :, start:stop] += torch.matmul(p.transpose(-1, -2), d_block)
            d_s = torch.matmul(d_block, values.transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
            if slope is not None:
                d_s.mul_(slope)
            d_query += torch.matmul(d_s, keys)
            dk[:, :, start:stop] += torch.matmul(d_s.transpose(-1, -2), block)
        dq[:, :, lo:hi] = d_query.view(batch, heads, hi - lo, size).to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
