"""Packed attention, forward and backward, against the masked definition in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from frugal.ops import attention, attention_reference
from frugal.ops.attention import segments
from frugal.ops.attention.triton import prepare_attention, tile_list
from frugal.ops.attention.triton_backward import prepare_attention_dkdv, prepare_attention_dq
from frugal.ops.rows import COMPILED_FOR, MAX_HEAD_SIZE
from tests.kernels.support import checked, close_to_exact, sparse_empty

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One call. Few programs (the interpreter is slow), but each mask, grouping and tile shape at least twice."""

    dtype: torch.dtype
    heads: tuple[int, int]
    size: int
    offsets: tuple[int, ...]
    tiles: tuple[int, int]
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    batch: int = 1
    spread: float = 1.0

    @property
    def tokens(self) -> int:
        return self.offsets[-1] // self.batch


CASES = [
    # tiles lower, square and wider than high; documents that end inside a tile, of one token, on a boundary
    Case(F32, (2, 2), 64, (0, 33, 34, 50), (16, 32)),
    Case(F32, (4, 1), 80, (0, 7, 40), (32, 16)),
    Case(F32, (2, 1), 96, (0, 32, 64), (16, 16), window=9),
    Case(F32, (1, 1), 64, (0, 70), (16, 16), window=40, softcap=3.0),
    Case(F32, (2, 1), 24, (0, 45), (16, 32), softcap=50.0, spread=7.0),
    Case(F32, (2, 1), 64, (0, 33, 49), (16, 32), causal=False),
    Case(F32, (1, 1), 64, (0, 20, 66), (32, 16), causal=False, window=11, softcap=2.0),
    Case(F32, (2, 1), 64, (0, 20, 33, 66), (16, 16), batch=2, window=5),
    Case(F32, (1, 1), 128, (0, 129), (64, 32), window=20),
    Case(F16, (4, 2), 64, (0, 33, 34, 50), (16, 32)),
    Case(F16, (1, 1), 256, (0, 33), (16, 32), window=30, softcap=30.0),
    Case(BF16, (4, 2), 128, (0, 33, 34, 50), (32, 16)),
    Case(BF16, (2, 1), 80, (0, 50), (16, 16), window=17, softcap=20.0),
    Case(BF16, (1, 1), 64, (0, 20, 41), (16, 32), causal=False),
]


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output, token by token in memory as projections write them."""
    generator = torch.Generator().manual_seed(case.size + case.tokens)
    heads, kv_heads = case.heads
    made = []
    for count, spread in ((heads, case.spread), (kv_heads, case.spread), (kv_heads, 1.0), (heads, 1.0)):
        t = spread * torch.randn(case.batch, case.tokens, count, case.size, generator=generator)
        made.append(t.to(case.dtype).transpose(1, 2))
    return made


def settings(case: Case) -> dict[str, Any]:
    return {"scale": case.size**-0.5, "window": case.window, "softcap": case.softcap, "causal": case.causal}


def expected(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention_reference(*leaves, cu_seqlens=case.offsets, **settings(case))
    return (out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype)))


def run(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv, lse) with poisoned outputs, under the sanitizer."""
    sizes = {"BM": case.tiles[0], "BN": case.tiles[1]}
    pieces = segments(case.batch, case.tokens, case.offsets)
    with checked():
        out, dq, dk, dv = (torch.empty_like(t) for t in (q, q, k, v))
        lse = torch.empty(q.shape[:3], dtype=F32)
        delta = torch.empty_like(lse)
        prepare_attention(q, k, v, out, lse, pieces, sizes=sizes, **settings(case)).run()
        prepare_attention_dq(d_out, q, k, v, out, lse, delta, dq, pieces, sizes=sizes, **settings(case)).run()
        prepare_attention_dkdv(d_out, q, k, v, lse, delta, dk, dv, pieces, sizes=sizes, **settings(case)).run()
    return out, dq, dk, dv, lse


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{str(c.dtype)[6:]}-{c.size}-{c.tiles}-{c.window}-{c.softcap}")
def test_forward_and_backward(case: Case) -> None:
    given = inputs(case)
    got = run(case, *given)
    exact = expected(case, *[t.double() for t in given])
    naive = expected(case, *given)
    # Rounding of the 16-bit probabilities and of their gradients between two products is FlashAttention's own.
    # Scores in the hundreds are rounded in the hundreds' last place.
    slack = (32.0 if case.dtype == F32 else 4.0) * case.spread**2
    for value, true, stock in zip(got[:4], exact, naive, strict=True):
        close_to_exact(value, true, stock, slack=slack)


def test_log_sum_exp_and_exactly_no_influence_of_other_documents() -> None:
    case = Case(F32, (1, 1), 64, (0, 13, 40), (16, 16))
    q, k, v, d_out = inputs(case)
    first = run(case, q, k, v, d_out)
    scores = (q @ k.transpose(-1, -2)).double() * case.size**-0.5
    scores = scores[..., 13:, 13:].masked_fill(torch.ones(27, 27).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(first[4][..., 13:].double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)
    for t in (q, k, v, d_out):
        t[:, :, :13] = torch.randn(1, 1, 13, 64) * 100
    again = run(case, q, k, v, d_out)
    for before, after in zip(first[:4], again[:4], strict=True):
        assert torch.equal(before[:, :, 13:], after[:, :, 13:])
        assert not torch.equal(before[:, :, :13], after[:, :, :13])


def test_soft_cap_has_its_values() -> None:
    """Scores 10, 50, 100, 500 under a cap of 50 are 9.869, 38.080, 48.201, 50.000: read off the log-sum-exp."""
    q = torch.zeros(1, 1, 4, 64)
    q[0, 0, :, 0] = torch.tensor([10.0, 50.0, 100.0, 500.0])
    k = torch.zeros(1, 1, 4, 64)
    k[..., 0] = 1.0
    out, lse = torch.empty_like(q), torch.empty(1, 1, 4)
    one_each = [(0, 1, i, i + 1) for i in range(4)]
    with checked():
        prepare_attention(q, k, k, out, lse, one_each, scale=1.0, softcap=50.0, sizes={"BM": 16, "BN": 16}).run()
    torch.testing.assert_close(lse[0, 0], torch.tensor([9.869, 38.080, 48.201, 50.000]), atol=5e-4, rtol=0)


def test_scores_far_below_zero() -> None:
    """Padded keys have score 0, far above the real ones: they must not count, and nothing overflows."""
    case = Case(F32, (1, 1), 64, (0, 21), (16, 16), spread=1.0)
    q, k, v, d_out = inputs(case)
    q[..., 0], k[..., 0] = 100.0, -80.0
    got = run(case, q, k, v, d_out)
    exact = expected(case, *[t.double() for t in (q, k, v, d_out)])
    for value, true, stock in zip(got[:4], exact, expected(case, q, k, v, d_out), strict=True):
        close_to_exact(value, true, stock, slack=64.0)


def test_the_operation_with_this_form() -> None:
    case = Case(F32, (2, 1), 64, (0, 21, 33), (64, 64), window=12)
    q, k, v, d_out = inputs(case)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    kept = {"scale": case.size**-0.5, "window": 12, "cu_seqlens": torch.tensor(case.offsets, dtype=torch.int32)}
    with checked() as report:
        out = attention(*leaves, implementation="triton", **kept)
        grads = torch.autograd.grad(out, leaves, d_out)
    assert report.launches == ["attention_kernel", "attention_dq_kernel", "attention_dkdv_kernel"]
    exact = expected(case, *[t.double() for t in (q, k, v, d_out)])
    for value, true, stock in zip((out.detach(), *grads), exact, expected(case, q, k, v, d_out), strict=True):
        close_to_exact(value, true, stock, slack=16.0)


def test_the_same_bits_in_any_order() -> None:
    case = Case(BF16, (2, 1), 64, (0, 33), (16, 16))
    given = inputs(case)
    pieces = segments(1, case.tokens, case.offsets)
    results = []
    for seed in (0, 5):
        out, lse, delta = torch.empty_like(given[0]), torch.empty(1, 2, 33), torch.empty(1, 2, 33)
        dq, dk, dv = (torch.empty_like(t) for t in given[:3])
        kept = {"sizes": {"BM": 16, "BN": 16}, **settings(case)}
        with checked(seed=seed):
            prepare_attention(*given[:3], out, lse, pieces, **kept).run()
            prepare_attention_dq(given[3], *given[:3], out, lse, delta, dq, pieces, **kept).run()
            prepare_attention_dkdv(given[3], *given[:3], lse, delta, dk, dv, pieces, **kept).run()
        results.append((out, dq, dk, dv))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tiles_cover_each_token_once_and_cross_no_document() -> None:
    pieces = segments(3, 40, (0, 40, 80, 81, 100, 120))
    for size in (16, 64):
        for longest_first in (True, False):
            rows = tile_list(tuple(pieces), size, longest_first, torch.device("cpu")).tolist()
            seen = [(row, t) for row, begin, stop, first in rows for t in range(first, min(first + size, stop))]
            assert sorted(seen) == [(r, t) for r in range(3) for t in range(40)]
            assert all(begin <= first < stop and (first - begin) % size == 0 for _, begin, stop, first in rows)
            work = [first - begin if longest_first else stop - first for _, begin, stop, first in rows]
            assert work == sorted(work, reverse=True)
    assert tile_list((), 16, True, torch.device("cpu")).shape == (0, 4)


def test_real_sizes() -> None:
    """Llama-3-70B's heads at 300,000 tokens: 64-bit addresses, last heads of the last document, which has 50 tokens."""
    tokens, heads, kv_heads, size = 300_000, 64, 8, 128
    wide = [sparse_empty((1, tokens, n, size), BF16).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads, heads)]
    q, k, v, out, d_out = wide
    assert tokens * heads * size > 2**31  # a 32-bit address would wrap
    lse, delta = (sparse_empty((1, heads, tokens), F32) for _ in range(2))
    dq = sparse_empty((1, tokens, heads, size), BF16).transpose(1, 2)
    dk, dv = (sparse_empty((1, tokens, kv_heads, size), BF16).transpose(1, 2) for _ in range(2))
    offsets = (*range(0, tokens - 50, 1000), tokens - 50, tokens)
    pieces = [(0, 1, a, b) for a, b in pairwise(offsets)]
    generator = torch.Generator().manual_seed(0)
    for t in (q, k, v, d_out):
        t[:, -8:, -50:] = torch.randn(1, min(8, t.shape[1]), 50, size, generator=generator).to(BF16)
    small = Case(BF16, (8, 1), size, (0, 50), (64, 64))
    given = [q[:, -8:, -50:], k[:, -1:, -50:], v[:, -1:, -50:], d_out[:, -8:, -50:]]
    exact, naive = (expected(small, *[t.to(d) for t in given]) for d in (torch.float64, BF16))
    kept: dict[str, Any] = {"scale": size**-0.5, "sizes": {"BM": 64, "BN": 64}}
    end = [0, tokens - 50, tokens, tokens - 50]
    order, keys = (tile_list(tuple(pieces), 64, x, torch.device("cpu")).tolist().index(end) for x in (True, False))

    def only(tile: int, count: int, wanted: range) -> dict[str, Any]:
        return {"programs": lambda grid: [(tile * count + h, 0, 0) for h in wanted], "races": False, "poison": False}

    with checked(**only(order, heads, range(heads - 8, heads))):
        prepare_attention(q, k, v, out, lse, pieces, **kept).run()
        prepare_attention_dq(d_out, q, k, v, out, lse, delta, dq, pieces, **kept).run()
    with checked(**only(keys, kv_heads, range(kv_heads - 1, kv_heads))):
        prepare_attention_dkdv(d_out, q, k, v, lse, delta, dk, dv, pieces, **kept).run()
    got = (out[:, -8:, -50:], dq[:, -8:, -50:], dk[:, -1:, -50:], dv[:, -1:, -50:])
    for value, true, stock in zip(got, exact, naive, strict=True):
        close_to_exact(value, true, stock, slack=4.0)
    assert out[:, :-8, -50:].abs().max() == 0


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_every_head_size_has_a_tile_on_every_target(dtype: torch.dtype) -> None:
    for size in (1, 8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256):
        if size > MAX_HEAD_SIZE[dtype]:
            continue
        q, k, lse = (
            torch.empty(1, 4, 9, size, dtype=dtype),
            torch.empty(1, 2, 9, size, dtype=dtype),
            torch.empty(1, 4, 9),
        )
        for target in (None, *COMPILED_FOR[1:], "sm_87", "sm_121"):
            kept: dict[str, Any] = {"scale": 1.0, "target": target}
            launches = [
                prepare_attention(q, k, k, q, lse, [(0, 1, 0, 9)], **kept),
                prepare_attention_dq(q, q, k, k, q, lse, lse, q, [(0, 1, 0, 9)], **kept),
                prepare_attention_dkdv(q, q, k, k, lse, lse, k, k, [(0, 1, 0, 9)], **kept),
            ]
            for launch in launches:
                assert size <= launch.constants["COLUMNS"] <= max(16, 2 * size)


def test_what_the_kernel_does_not_take() -> None:
    q, k = torch.zeros(1, 2, 4, 64), torch.zeros(1, 2, 4, 64)
    out, lse = torch.zeros_like(q), torch.zeros(1, 2, 4)
    kept: dict[str, Any] = {"scale": 1.0, "sizes": {"BM": 16, "BN": 16}}
    wide = torch.zeros(1, 2, 4, 288)
    with pytest.raises(ValueError, match="head size 288"):
        prepare_attention(wide, wide, wide, wide, lse, [(0, 1, 0, 4)], **kept)
    with pytest.raises(ValueError, match="float64"):
        prepare_attention(q.double(), k.double(), k.double(), out.double(), lse, [(0, 1, 0, 4)], **kept)
    with pytest.raises(ValueError, match="contiguous heads"):
        prepare_attention(q, k.transpose(2, 3).contiguous().transpose(2, 3), k, out, lse, [(0, 1, 0, 4)], **kept)
    with pytest.raises(ValueError, match="do not fit"):
        prepare_attention(q, k[:, :, :3], k[:, :, :3], out, lse, [(0, 1, 0, 4)], **kept)
