"""Attention over packed documents: backward, in two launches without atomics, so the result is the same every time.

The first launch goes over tiles of queries: it sums delta = rowsum(out * d_out), stores it, and makes dq. The second
goes over tiles of keys and of every query head that shares them, and makes dk and dv (Dao 2023, algorithm 2, split in
two). Probabilities are made again from the log-sum-exp that forward kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.attention.triton import (
    Segment,
    cap_scores,
    check_operands,
    constants,
    is_seen,
    key_ranges,
    load_rows,
    store_rows,
    strides,
    tile_entry,
    tile_list,
    tile_of,
)
from frugal.ops.launch import Launch


@triton.jit
def query_gradient(
    q, d_out, level, delta, dq, K, V, stride_k, stride_v, lo, hi, stop, query, scale, softcap, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq / scale of one walk over keys lo..hi, added to ``dq``."""
    for start in range(lo, hi, BN):
        k = load_rows(K, start, stride_k, stop, MASK, BN, SIZE, COLUMNS)
        s, slope = cap_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, SOFTCAP)
        p = tl.exp2(s - level[:, None])
        if MASK:
            p = tl.where(is_seen(query, start + tl.arange(0, BN), stop, window, CAUSAL, WINDOW), p, 0.0)
        v = load_rows(V, start, stride_v, stop, MASK, BN, SIZE, COLUMNS)
        ds = p * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if SOFTCAP:
            ds = ds * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def attention_dq_kernel(
    Q, K, V, OUT, D_OUT, LSE, DELTA, DQ, TILES, heads, groups, tokens, scale, softcap, window,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, gb, gh, gs, xb, xh, xs,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, head, begin, stop, first = tile_entry(TILES, heads)
    query = first + tl.arange(0, BM)
    keys = K + row * kb + head // groups * kh
    values = V + row * vb + head // groups * vh
    at = (row * heads + head) * tokens + query
    d_out = load_rows(D_OUT + row * gb + head * gh, first, gs, stop, True, BM, SIZE, COLUMNS)
    out = load_rows(OUT + row * ob + head * oh, first, os, stop, True, BM, SIZE, COLUMNS)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(DELTA + at, delta, mask=query < stop)
    q = load_rows(Q + row * qb + head * qh, first, qs, stop, True, BM, SIZE, COLUMNS)
    level = tl.load(LSE + at, mask=query < stop, other=0.0) * 1.4426950408889634
    dq = tl.zeros((BM, COLUMNS), tl.float32)
    a, b, c, d = key_ranges(first, begin, stop, window, CAUSAL, WINDOW, BM, BN)
    if WINDOW:
        dq = query_gradient(
            q, d_out, level, delta, dq, keys, values, ks, vs, a, tl.minimum(b, d), stop, query, scale, softcap, window,
            True, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BN, PRECISION)  # fmt: skip
    dq = query_gradient(
        q, d_out, level, delta, dq, keys, values, ks, vs, b, c, stop, query, scale, softcap, window,
        False, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BN, PRECISION)  # fmt: skip
    dq = query_gradient(
        q, d_out, level, delta, dq, keys, values, ks, vs, c, d, stop, query, scale, softcap, window,
        True, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BN, PRECISION)  # fmt: skip
    store_rows(DQ + row * xb + head * xh, dq * scale, first, xs, stop, BM, SIZE, COLUMNS)


@triton.jit
def key_gradients(
    k, v, dk, dv, Q, D_OUT, LSE, DELTA, stride_q, stride_g, lo, hi, stop, key, scale, softcap, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk / scale and dv of one walk over queries lo..hi, added. Queries past the document are 0 and add nothing."""
    for start in range(lo, hi, BM):
        query = start + tl.arange(0, BM)
        q = load_rows(Q, start, stride_q, stop, True, BM, SIZE, COLUMNS)
        level = tl.load(LSE + query, mask=query < stop, other=0.0) * 1.4426950408889634
        s, slope = cap_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, SOFTCAP)
        p = tl.exp2(s - level[:, None])
        if MASK:
            p = tl.where(is_seen(query, key, stop, window, CAUSAL, WINDOW), p, 0.0)
        d_out = load_rows(D_OUT, start, stride_g, stop, True, BM, SIZE, COLUMNS)
        dv = tl.dot(tl.trans(p.to(d_out.dtype)), d_out, dv, input_precision=PRECISION)
        delta = tl.load(DELTA + query, mask=query < stop, other=0.0)
        ds = p * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if SOFTCAP:
            ds = ds * slope
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def attention_dkdv_kernel(
    Q, K, V, D_OUT, LSE, DELTA, DK, DV, TILES, heads, kv_heads, tokens, scale, softcap, window,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, gb, gh, gs, xb, xh, xs, yb, yh, ys,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, kv_head, begin, stop, first = tile_entry(TILES, kv_heads)
    key = first + tl.arange(0, BN)
    k = load_rows(K + row * kb + kv_head * kh, first, ks, stop, True, BN, SIZE, COLUMNS)
    v = load_rows(V + row * vb + kv_head * vh, first, vs, stop, True, BN, SIZE, COLUMNS)
    # Queries a..b need the mask, b..c do not, c..d do.
    a = begin
    b = begin
    if CAUSAL:
        a = first
        b = first + (BN + BM - 2) // BM * BM
    c = stop
    d = stop
    if WINDOW:
        d = tl.minimum(stop, first + BN - 1 + window)
        c = b + tl.maximum(first + window - b, 0) // BM * BM
    dk = tl.zeros((BN, COLUMNS), tl.float32)
    dv = tl.zeros((BN, COLUMNS), tl.float32)
    groups = heads // kv_heads
    for group in range(groups):
        head = kv_head * groups + group
        queries = Q + row * qb + head * qh
        grads = D_OUT + row * gb + head * gh
        lse = LSE + (row * heads + head) * tokens
        sums = DELTA + (row * heads + head) * tokens
        if CAUSAL:
            dk, dv = key_gradients(
                k, v, dk, dv, queries, grads, lse, sums, qs, gs, a, tl.minimum(b, d), stop, key, scale, softcap, window,
                True, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BM, PRECISION)  # fmt: skip
        dk, dv = key_gradients(
            k, v, dk, dv, queries, grads, lse, sums, qs, gs, b, tl.minimum(c, d), stop, key, scale, softcap, window,
            False, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BM, PRECISION)  # fmt: skip
        if WINDOW:
            dk, dv = key_gradients(
                k, v, dk, dv, queries, grads, lse, sums, qs, gs, c, d, stop, key, scale, softcap, window,
                True, CAUSAL, WINDOW, SOFTCAP, SIZE, COLUMNS, BM, PRECISION)  # fmt: skip
    store_rows(DK + row * xb + kv_head * xh, dk * scale, first, xs, stop, BN, SIZE, COLUMNS)
    store_rows(DV + row * yb + kv_head * yh, dv, first, ys, stop, BN, SIZE, COLUMNS)


def prepare_attention_dq(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    segments: Sequence[Segment], *, scale: float, window: int | None = None, softcap: float | None = None,
    causal: bool = True, target: str | None = None, sizes: dict[str, int] | None = None,
) -> Launch:  # fmt: skip
    """``dq``, and ``delta`` float32 [batch, heads, tokens] for the launch of `prepare_attention_dkdv` after it."""
    check_operands(q, k, v, out, d_out, dq)
    heads, tokens = q.shape[1], q.shape[2]
    fixed = constants(q, window, softcap, causal)
    sizes = dict(sizes or tile_of("attention_dq", q, target))
    bm, bn = sizes.pop("BM"), sizes.pop("BN")
    tiles = tile_list(tuple(segments), bm, causal, q.device)
    return Launch(
        attention_dq_kernel,
        (len(tiles) * heads,),
        (q, k, v, out, d_out, lse, delta, dq, tiles, heads, heads // k.shape[1], tokens, float(scale),
         float(softcap or 1.0), window or 0, *strides(q, k, v, out, d_out, dq)),
        {**fixed, "BM": bm, "BN": bn},
        sizes,
    )  # fmt: skip


def prepare_attention_dkdv(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    segments: Sequence[Segment], *, scale: float, window: int | None = None, softcap: float | None = None,
    causal: bool = True, target: str | None = None, sizes: dict[str, int] | None = None,
) -> Launch:  # fmt: skip
    """``dk`` and ``dv``, sums over the query heads that share a key head."""
    check_operands(q, k, v, d_out, dk, dv)
    heads, kv_heads, tokens = q.shape[1], k.shape[1], q.shape[2]
    fixed = constants(q, window, softcap, causal)
    sizes = dict(sizes or tile_of("attention_dkdv", q, target))
    bm, bn = sizes.pop("BM"), sizes.pop("BN")
    tiles = tile_list(tuple(segments), bn, False, q.device)
    return Launch(
        attention_dkdv_kernel,
        (len(tiles) * kv_heads,),
        (q, k, v, d_out, lse, delta, dk, dv, tiles, heads, kv_heads, tokens, float(scale), float(softcap or 1.0),
         window or 0, *strides(q, k, v, d_out, dk, dv)),
        {**fixed, "BM": bm, "BN": bn},
        sizes,
    )  # fmt: skip


def attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Sequence[Segment], *,
    scale: float, window: int | None = None, softcap: float | None = None, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v in their dtypes, laid out token by token."""
    delta = torch.empty_like(lse)
    dq, dk, dv = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (q, k, v))
    settings: dict[str, float | int | bool | None] = {
        "scale": scale, "window": window, "softcap": softcap, "causal": causal,
    }  # fmt: skip
    prepare_attention_dq(d_out, q, k, v, out, lse, delta, dq, segments, **settings).run()  # type: ignore[arg-type]
    prepare_attention_dkdv(d_out, q, k, v, lse, delta, dk, dv, segments, **settings).run()  # type: ignore[arg-type]
    return dq, dk, dv
