# ruff: noqa: E501
"""Faults planted in the attention kernels; the list is part of `mutants.MUTANTS`, in its form."""

from __future__ import annotations

FORWARD, BACKWARD, TESTS = "attention", "attention_backward", "attention"

ATTENTION_MUTANTS: list[tuple[str, str, str, str, str]] = [
    (FORWARD, TESTS, "a token does not see itself", "query[:, None] >= key[None, :]", "query[:, None] > key[None, :]"),
    (FORWARD, TESTS, "keys past the document", "seen = (key < stop)[None, :]", "seen = (key < stop + 64)[None, :]"),
    (FORWARD, TESTS, "window one token too wide", "query[:, None] - key[None, :] < window", "query[:, None] - key[None, :] <= window"),
    (FORWARD, TESTS, "window's first block not masked", "b = a + tl.cdiv(tl.maximum(first + BM - window - a, 0), BN) * BN", "b = a"),
    (FORWARD, TESTS, "unmasked keys reach the diagonal", "limit = first + 1\n", "limit = first + BM\n"),
    (FORWARD, TESTS, "keys end a tile early", "d = tl.minimum(stop, first + BM)", "d = tl.minimum(stop, first + 1)"),
    (FORWARD, TESTS, "document before is seen", "    a = begin\n    d = stop\n", "    a = begin * 0\n    d = stop\n"),
    (FORWARD, TESTS, "mixed values not rescaled", "v, mixed * shrink[:, None], input", "v, mixed, input"),
    (FORWARD, TESTS, "sum not rescaled", "total = total * shrink + tl.sum(p, 1)", "total = total + tl.sum(p, 1)"),
    (FORWARD, TESTS, "log-sum-exp in base two", "lse = (top + tl.log2(total)) * 0.6931471805599453", "lse = top + tl.log2(total)"),
    (FORWARD, TESTS, "soft cap dropped", "return t * (softcap * 1.4426950408889634), 1.0 - t * t", "return product * (scale * 1.4426950408889634), 1.0 - t * t"),
    (FORWARD, TESTS, "slope of the soft cap", "1.0 - t * t", "1.0 - t"),
    (FORWARD, TESTS, "key head of another group", "keys = K + row * kb + head // groups * kh", "keys = K + row * kb + head % (heads // groups) * kh"),
    (FORWARD, TESTS, "values of the first row for all", "values = V + row * vb + head", "values = V + head"),
    (FORWARD, TESTS, "rows of the output not masked", "mask = (start + lane < stop)[:, None] & (column < SIZE)[None, :]\n    tl.store", "mask = (column < SIZE)[None, :]\n    tl.store"),
    (FORWARD, TESTS, "padded columns stored", "mask = (start + lane < stop)[:, None] & (column < SIZE)[None, :]\n    tl.store", "mask = (start + lane < stop)[:, None]\n    tl.store"),
    (FORWARD, TESTS, "lanes of log-sum-exp not masked", "query, lse, mask=query < stop)", "query, lse)"),
    (FORWARD, TESTS, "32-bit addresses", "(tl.full((), 0, tl.int64) + start) * stride", "start * stride"),
    (FORWARD, TESTS, "a tile in two documents", "starts = np.arange(begin, stop, size)", "starts = np.arange(begin // size * size, stop, size)"),
    (FORWARD, TESTS, "query and key tiles mixed up", "for start in range(lo, hi, BN):\n        k", "for start in range(lo, hi, 32):\n        k"),
    (BACKWARD, TESTS, "delta dropped from dq", "tl.trans(v), input_precision=PRECISION) - delta[:, None])\n        if SOFTCAP:\n            ds = ds * slope\n        dq", "tl.trans(v), input_precision=PRECISION))\n        if SOFTCAP:\n            ds = ds * slope\n        dq"),
    (BACKWARD, TESTS, "dq's mask a token off", "p = tl.where(is_seen(query, start + tl.arange", "p = tl.where(is_seen(query, start + 1 + tl.arange"),
    (BACKWARD, TESTS, "dq without the scale", "dq * scale, first", "dq, first"),
    (BACKWARD, TESTS, "delta not stored", "tl.store(DELTA + at, delta, mask=query < stop)", "pass"),
    (BACKWARD, TESTS, "dk without the scale", "dk * scale, first", "dk, first"),
    (BACKWARD, TESTS, "dk and dv in each other's place", "store_rows(DV + row * yb + kv_head * yh, dv,", "store_rows(DV + row * yb + kv_head * yh, dk,"),
    (BACKWARD, TESTS, "first query head of the group for all", "head = kv_head * groups + group", "head = kv_head * groups"),
    (BACKWARD, TESTS, "last query head left out", "for group in range(groups):", "for group in range(groups - 1):"),
    (BACKWARD, TESTS, "diagonal block not masked", "b = first + (BN + BM - 2) // BM * BM", "b = first + (BN + BM - 2) // BM * 0"),
    (BACKWARD, TESTS, "diagonal too short for high tiles", "b = first + (BN + BM - 2) // BM * BM", "b = first + BM"),
    (BACKWARD, TESTS, "queries end a window early", "d = tl.minimum(stop, first + BN - 1 + window)", "d = tl.minimum(stop, first + window)"),
    (BACKWARD, TESTS, "window not masked in dk", "c = b + tl.maximum(first + window - b, 0) // BM * BM", "c = d"),
    (BACKWARD, TESTS, "slope of the cap dropped in dk", "            ds = ds * slope\n        dk", "            ds = ds * 1.0\n        dk"),
    (BACKWARD, TESTS, "bidirectional keys start at their own tile", "    a = begin\n    b = begin\n    if CAUSAL:", "    a = first\n    b = first\n    if CAUSAL:"),
    (BACKWARD, TESTS, "queries past the document", "q = load_rows(Q, start, stride_q, stop, True,", "q = load_rows(Q, start, stride_q, stop, False,"),
]  # fmt: skip
