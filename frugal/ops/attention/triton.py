"""Attention over packed documents: forward. Backward is in `frugal.ops.attention.triton_backward`.

FlashAttention-2's online softmax (Dao 2023, algorithm 1), one program for a tile of queries of one document and one
head. A table of tiles, made on the host from the documents' lengths, is the launch grid: no program is wasted on a pair
of documents, and nothing of size [S, S] exists. Tiles with the most keys come first, so that the last programs to run
are short ones. Heads are the fastest index: heads that share keys run side by side.

Head sizes that are no power of two are padded in registers only. Addresses are 64 bit; offsets inside a tile 32 bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.launch import Launch, next_power_of_2, tile
from frugal.ops.rows import attention_size_refusal

Segment = tuple[int, int, int, int]  # rows from..to (exclusive), tokens from..to (exclusive): one document a row


@triton.jit
def load_rows(
    BASE, start, stride, stop,
    CHECK: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] from row ``start`` of a head; rows from ``stop`` on (if CHECK) and columns from SIZE on are 0."""
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = BASE + (tl.full((), 0, tl.int64) + start) * stride + lane[:, None] * stride + column[None, :]
    if CHECK:
        if SIZE == COLUMNS:
            return tl.load(at, mask=(start + lane < stop)[:, None], other=0.0)
        else:
            return tl.load(at, mask=(start + lane < stop)[:, None] & (column < SIZE)[None, :], other=0.0)
    else:
        if SIZE == COLUMNS:
            return tl.load(at)
        else:
            return tl.load(at, mask=(column < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(
    BASE, value, start, stride, stop,
    ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The counterpart of `load_rows` with CHECK."""
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = BASE + (tl.full((), 0, tl.int64) + start) * stride + lane[:, None] * stride + column[None, :]
    mask = (start + lane < stop)[:, None] & (column < SIZE)[None, :]
    tl.store(at, value.to(BASE.dtype.element_ty), mask=mask)


@triton.jit
def tile_entry(TILES, heads):
    """This program's (row, head, first token of the document, its last + 1, first token of the tile)."""
    entry = TILES + (tl.program_id(0) // heads) * 4
    head = (tl.program_id(0) % heads).to(tl.int64)
    return tl.load(entry).to(tl.int64), head, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def cap_scores(product, scale, softcap, SOFTCAP: tl.constexpr):
    """(score in units of log 2, 1 - tanh^2) of q k^T."""
    if SOFTCAP:
        # tanh(y) = 2 sigmoid(2 y) - 1
        t = 2.0 * tl.sigmoid(product * (2.0 * scale / softcap)) - 1.0
        return t * (softcap * 1.4426950408889634), 1.0 - t * t
    else:
        return product * (scale * 1.4426950408889634), 1.0


@triton.jit
def is_seen(query, key, stop, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Bool [queries, keys] from positions: keys of the document, not later, inside the window."""
    seen = (key < stop)[None, :]
    if CAUSAL:
        seen = seen & (query[:, None] >= key[None, :])
    if WINDOW:
        seen = seen & (query[:, None] - key[None, :] < window)
    return seen


@triton.jit
def key_ranges(
    first, begin, stop, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Keys of queries first .. first + BM as (a, b, c, d): a..b needs the mask, b..c does not, c..d does."""
    a = begin
    d = stop
    limit = stop
    if CAUSAL:
        d = tl.minimum(stop, first + BM)
        limit = first + 1
    b = a
    if WINDOW:
        a = tl.maximum(begin, first - window + 1)
        b = a + tl.cdiv(tl.maximum(first + BM - window - a, 0), BN) * BN
    c = b + tl.maximum(limit - b, 0) // BN * BN
    return a, b, c, d


@triton.jit
def attend(
    q, top, total, mixed, K, V, stride_k, stride_v, lo, hi, stop, query, scale, softcap, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One walk over keys lo..hi."""
    for start in range(lo, hi, BN):
        k = load_rows(K, start, stride_k, stop, MASK, BN, SIZE, COLUMNS)
        s, _ = cap_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, SOFTCAP)
        if MASK:
            s = tl.where(is_seen(query, start + tl.arange(0, BN), stop, window, CAUSAL, WINDOW), s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # A query may see nothing of this tile and of those before.
        finite = tl.where(higher == -float("inf"), 0.0, higher) if MASK else higher
        p = tl.exp2(s - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(V, start, stride_v, stop, MASK, BN, SIZE, COLUMNS)
        mixed = tl.dot(p.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        top = higher
    return top, total, mixed


@triton.jit
def attention_kernel(
    Q, K, V, OUT, LSE, TILES, heads, groups, tokens, scale, softcap, window,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, head, begin, stop, first = tile_entry(TILES, heads)
    query = first + tl.arange(0, BM)
    keys = K + row * kb + head // groups * kh
    values = V + row * vb + head // groups * vh
    q = load_rows(Q + row * qb + head * qh, first, qs, stop, True, BM, SIZE, COLUMNS)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, COLUMNS), tl.float32)
    a, b, c, d = key_ranges(first, begin, stop, window, CAUSAL, WINDOW, BM, BN)
    if WINDOW:
        top, total, mixed = attend(
            q, top, total, mixed, keys, values, ks, vs, a, tl.minimum(b, d), stop, query, scale, softcap, window,
            True, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BN, PRECISION)  # fmt: skip
    top, total, mixed = attend(
        q, top, total, mixed, keys, values, ks, vs, b, c, stop, query, scale, softcap, window,
        False, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BN, PRECISION)  # fmt: skip
    top, total, mixed = attend(
        q, top, total, mixed, keys, values, ks, vs, c, d, stop, query, scale, softcap, window,
        True, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BN, PRECISION)  # fmt: skip
    lse = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(LSE + (row * heads + head) * tokens + query, lse, mask=query < stop)
    store_rows(OUT + row * ob + head * oh, mixed / total[:, None], first, os, stop, BM, SIZE, COLUMNS)


@functools.lru_cache(maxsize=16)
def tile_list(segments: tuple[Segment, ...], size: int, longest_first: bool, device: torch.device) -> Tensor:
    """int32 [tiles, 4]: (row, first token of the document, its last + 1, first token of the tile), tile by tile.

    ``longest_first``: tiles at the end of long documents lead (queries under causality); else those at the start do.
    """
    parts = []
    for first_row, last_row, begin, stop in segments:
        starts = np.arange(begin, stop, size)
        for row in range(first_row, last_row):
            part = np.empty((starts.size, 4), dtype=np.int32)
            part[:, 0], part[:, 1], part[:, 2], part[:, 3] = row, begin, stop, starts
            parts.append(part)
    table = np.concatenate(parts) if parts else np.empty((0, 4), dtype=np.int32)
    work = table[:, 3] - table[:, 1] if longest_first else table[:, 2] - table[:, 3]
    return torch.from_numpy(table[np.argsort(-work, kind="stable")]).to(device)


def check_operands(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    """Raise ``ValueError`` for shapes, dtypes or strides that the kernels do not take."""
    reason = attention_size_refusal(q.shape[-1], q.dtype)
    if reason is not None:
        raise ValueError(f"attention: {reason}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: shapes do not fit: {[tuple(t.shape) for t in (q, k, v)]}")
    if any(t.dtype != q.dtype for t in (k, v, *others)) or any(t.stride(-1) != 1 for t in (q, k, v, *others)):
        raise ValueError("attention: one dtype and contiguous heads expected")


def strides(*tensors: Tensor) -> list[int]:
    """(batch, head, token) strides of each [batch, heads, tokens, size] tensor."""
    return [t.stride(i) for t in tensors for i in (0, 1, 2)]


def constants(q: Tensor, window: int | None, softcap: float | None, causal: bool) -> dict[str, object]:
    """The ``tl.constexpr`` parameters that all three kernels share.

    float32 products are split into three TF32 products, which keeps float32's accuracy on tensor cores.
    """
    size = q.shape[-1]
    return {
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "SOFTCAP": softcap is not None,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee",
        "SIZE": size,
        "COLUMNS": max(16, next_power_of_2(size)),
    }


def tile_of(kernel: str, q: Tensor, target: str | None) -> dict[str, int]:
    """The tile table's entry of ``kernel`` for ``q``'s head size; small heads take that of 64."""
    return tile(f"{kernel}_d{max(64, next_power_of_2(q.shape[-1]))}", q.dtype, q.device, target)


def prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Sequence[Segment], *,
    scale: float, window: int | None = None, softcap: float | None = None, causal: bool = True,
    target: str | None = None, sizes: dict[str, int] | None = None,
) -> Launch:  # fmt: skip
    """``out`` [batch, heads, tokens, size] and ``lse`` float32 [batch, heads, tokens] (contiguous, natural log).

    ``segments`` are the documents (`frugal.ops.attention.segments`); ``window`` counts the token itself. ``sizes``
    replaces the tile table's entry. Raises ``ValueError`` for operands that the kernel does not take.
    """
    check_operands(q, k, v, out)
    heads, tokens = q.shape[1], q.shape[2]
    fixed = constants(q, window, softcap, causal)
    sizes = dict(sizes or tile_of("attention", q, target))
    bm, bn = sizes.pop("BM"), sizes.pop("BN")
    tiles = tile_list(tuple(segments), bm, causal, q.device)
    return Launch(
        attention_kernel,
        (len(tiles) * heads,),
        (q, k, v, out, lse, tiles, heads, heads // k.shape[1], tokens, float(scale), float(softcap or 1.0), window or 0,
         *strides(q, k, v, out)),
        {**fixed, "BM": bm, "BN": bn},
        sizes,
    )  # fmt: skip


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], *,
    scale: float, window: int | None = None, softcap: float | None = None, causal: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `prepare_attention`; returns out (laid out token by token, as the next projection reads it) and lse."""
    batch, heads, tokens, size = q.shape
    out = q.new_empty(batch, tokens, heads, size).transpose(1, 2)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    prepare_attention(q, k, v, out, lse, segments, scale=scale, window=window, softcap=softcap, causal=causal).run()
    return out, lse
