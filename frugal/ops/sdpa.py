"""torch's scaled_dot_product_attention, document by document, held to the backends that build no [S, S] scores.

On CUDA two backends qualify: flash (compute capability 8.0 and later, 16 bits) and memory-efficient (all). The latter
does not know grouped queries: asked with ``enable_gqa`` torch would silently take the mathematical form with all scores
instead. So groups are given to it as a batch, keys and values with a stride of 0: views, nothing is copied forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from frugal.ops.target import Target, target_of

Segment = tuple[int, int, int, int]


def takes_flash(target: Target, dtype: torch.dtype, head_size: int) -> bool:
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


def sdpa(q: Tensor, k: Tensor, v: Tensor, pieces: list[Segment], scale: float, causal: bool) -> Tensor:
    """Attention of every document in ``pieces``; shapes as in `frugal.ops.attention`."""
    gqa = q.shape[1] != k.shape[1]
    target = target_of(q.device)
    only: AbstractContextManager[object] = nullcontext()
    as_batch = False
    if target.kind == "cuda":
        flash = takes_flash(target, q.dtype, q.shape[-1])
        only = sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION)
        as_batch = gqa and not flash

    def run(r0: int, r1: int, s0: int, s1: int) -> Tensor:
        queries, keys, values = (t[r0:r1, :, s0:s1] for t in (q, k, v))
        if as_batch:
            out = F.scaled_dot_product_attention(
                *grouped_as_batch(queries, keys, values), is_causal=causal, scale=scale
            )
            return out.reshape(queries.shape)
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, scale=scale, enable_gqa=gqa)

    with only:
        if len(pieces) == 1 and pieces[0] == (0, q.shape[0], 0, q.shape[2]):
            return run(*pieces[0])
        by_row: dict[tuple[int, int], list[Tensor]] = {}
        for piece in pieces:
            by_row.setdefault(piece[:2], []).append(run(*piece))
    return torch.cat([torch.cat(parts, dim=2) for parts in by_row.values()], dim=0)
