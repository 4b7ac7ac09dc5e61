"""One document of attention by torch's own CPU flash kernel, which keeps the log-sum-exp instead of the scores.

A window is walked in blocks of query rows: a block needs keys from its first row's window to its last row, so the mask
is [block, block + window] and the same for all inner blocks. Short causal documents go by blocks of rows as well: the
kernel leaves out masked keys only in steps of 512, so at 512 tokens it computes the whole square (measured at 2 x 512,
9 heads of 64, two threads: two forwards and a backward 47 -> 41 ms; at 640 tokens 65 -> 63, at 768 whole calls win by
70 against 82, at 1024 by 122 against 131).
"""

from __future__ import annotations

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MIN_BLOCK = 128  # query rows of a block of a window: below it the kernel's own tiles are not filled
CAUSAL_BLOCK = 256  # query rows of a block of a causal document
CAUSAL_BLOCKS_FROM, CAUSAL_BLOCKS_TO = 256, 640  # tokens of a causal document that goes by blocks


def _window_blocks(tokens: int, window: int) -> list[tuple[int, int, int]]:
    """(first query, last query + 1, first key) of each block; its keys end with its last query."""
    step = max(MIN_BLOCK, window // 2)
    return [(lo, min(lo + step, tokens), max(0, lo - window + 1)) for lo in range(0, tokens, step)]


def _blocks(tokens: int, window: int | None, causal: bool) -> list[tuple[int, int, int]] | None:
    """Blocks as in `_window_blocks`; None where one call of the kernel does it."""
    if window is not None and window < tokens:
        return _window_blocks(tokens, window)
    if causal and CAUSAL_BLOCKS_FROM < tokens <= CAUSAL_BLOCKS_TO:
        return [(lo, min(lo + CAUSAL_BLOCK, tokens), 0) for lo in range(0, tokens, CAUSAL_BLOCK)]
    return None


def _window_mask(q: Tensor, lo: int, hi: int, first: int, window: int) -> Tensor:
    """0 where query lo..hi sees key first..hi, else -inf: [hi - lo, hi - first]."""
    i = torch.arange(lo, hi, device=q.device)[:, None]
    j = torch.arange(first, hi, device=q.device)[None, :]
    mask = torch.zeros(hi - lo, hi - first, dtype=q.dtype, device=q.device)
    return mask.masked_fill_((j > i) | (i - j >= window), -torch.inf)


def cpu_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, D] and log-sum-exp [B, Hq, S]. ``softcap`` must be None (the table sees to it)."""
    tokens = q.shape[2]
    blocks = _blocks(tokens, window, causal)
    if blocks is None:
        out, lse = _forward(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    out = q.new_empty(q.shape[0], tokens, q.shape[1], q.shape[3]).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for lo, hi, first in blocks:
        mask = _window_mask(q, lo, hi, first, tokens if window is None else window)
        out[:, :, lo:hi], lse[:, :, lo:hi] = _forward(
            q[:, :, lo:hi], k[:, :, first:hi], v[:, :, first:hi], 0.0, False, attn_mask=mask, scale=scale
        )
    return out, lse


def cpu_flash_backward(
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
    """Gradients of q, k and v."""
    tokens = q.shape[2]
    blocks = _blocks(tokens, window, causal)
    if blocks is None:
        dq, dk, dv = _backward(d_out, q, k, v, out, lse, 0.0, causal, scale=scale)
        return dq, dk, dv
    dq = q.new_empty(q.shape[0], tokens, q.shape[1], q.shape[3]).transpose(1, 2)
    dk, dv = (t.new_zeros(t.shape[0], tokens, t.shape[1], t.shape[3]).transpose(1, 2) for t in (k, v))
    for lo, hi, first in blocks:
        mask = _window_mask(q, lo, hi, first, tokens if window is None else window)
        rows, keys = slice(lo, hi), slice(first, hi)
        part_q, part_k, part_v = _backward(
            d_out[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows],
            0.0, False, attn_mask=mask, scale=scale,
        )  # fmt: skip
        dq[:, :, rows] = part_q
        dk[:, :, keys] += part_k
        dv[:, :, keys] += part_v
    return dq, dk, dv
