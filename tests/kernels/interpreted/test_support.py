"""The sanitizer, the repaired bf16 and the sparse tensors find what they are there to find."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.support import KernelFault, bits_equal, checked, close_to_exact, sparse_empty


@triton.jit
def add_kernel(X, Y, OUT, n, BLOCK: tl.constexpr, UNMASKED: tl.constexpr, OTHER: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(X + at, mask=mask, other=0.0) if OTHER else tl.load(X + at, mask=mask)
    total = x + tl.load(Y + at, mask=mask, other=0.0)
    if UNMASKED:
        tl.store(OUT + at, total)
    else:
        tl.store(OUT + at, total, mask=mask)


@triton.jit
def sum_kernel(X, OUT, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(X + at, mask=at < n, other=0.0), 0)
    if ATOMIC:
        tl.atomic_add(OUT, part)
    else:
        tl.store(OUT, tl.load(OUT) + part)


@triton.jit
def masked_sum_kernel(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT, tl.sum(tl.load(X + at, mask=at < n), 0))


@triton.jit
def double_kernel(X, stride, n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + at, mask=at < n, other=0.0)
    tl.store(X + row * stride + at, x * 2, mask=at < n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    x, y = torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    with checked():
        out = torch.empty_like(x)
        assert out.isnan().all()
        add_kernel[(4,)](x, y, out, 100, BLOCK=32, UNMASKED=False, OTHER=True)
    bits_equal(out, x + y)


def test_reductions_and_products_of_bf16() -> None:
    x = torch.randn(64).bfloat16()
    out = torch.zeros(1, dtype=torch.bfloat16)
    with checked():
        sum_kernel[(1,)](x, out, 64, BLOCK=64, ATOMIC=False)
    bits_equal(out, x.float().sum().bfloat16().view(1))


def test_stores_out_of_bounds() -> None:
    x = torch.randn(100)
    with pytest.raises(KernelFault, match="store out of bounds, 28 of 32"), checked():
        add_kernel[(4,)](x, x.clone(), torch.empty(100), 100, BLOCK=32, UNMASKED=True, OTHER=True)


def test_the_columns_between_two_rows_of_a_view_are_out_of_bounds() -> None:
    wide = torch.zeros(4, 96)
    with checked():
        double_kernel[(4,)](wide[:, :40], 96, 40, BLOCK=64, WIDE=True)
    with pytest.raises(KernelFault, match="out of bounds"), checked():
        double_kernel[(4,)](wide[:, :40], 96, 41, BLOCK=64, WIDE=True)


def test_races() -> None:
    x = torch.ones(100)
    with pytest.raises(KernelFault, match="written by more than one"), checked():
        sum_kernel[(4,)](x, torch.zeros(1), 100, BLOCK=32, ATOMIC=False)
    with checked() as report:
        out = torch.zeros(1)
        sum_kernel[(4,)](x, out, 100, BLOCK=32, ATOMIC=True)
    assert out.item() == 100
    assert (report.loaded, report.stored, report.updated) == (400, 0, 16)


def test_programs_that_overlap_race() -> None:
    with pytest.raises(KernelFault, match="written by more than one"), checked():
        double_kernel[(4,)](torch.zeros(200), 30, 40, BLOCK=64, WIDE=True)


def test_lanes_without_other_are_garbage() -> None:
    out = torch.zeros(1)
    with checked():
        masked_sum_kernel[(1,)](torch.ones(10), out, 10, BLOCK=16)
    assert out.isnan()


def test_order_is_shuffled_and_programs_can_be_chosen() -> None:
    x = torch.ones(4, 8)
    with checked(programs=lambda grid: [(grid[0] - 1, 0, 0)]):
        double_kernel[(4,)](x, 8, 8, BLOCK=8, WIDE=True)
    assert x.sum(1).tolist() == [8, 8, 8, 16]


def test_int32_addresses_overflow_at_real_sizes() -> None:
    logits = sparse_empty((20_000, 128_256), torch.float16)  # 5.1 GB of addresses
    logits[-1, :3] = torch.tensor([1.0, 2.0, 3.0])
    last = {"programs": lambda grid: [(grid[0] - 1, 0, 0)], "races": False, "poison": False}
    with pytest.raises(KernelFault), checked(**last):
        double_kernel[(20_000,)](logits, 128_256, 128_256, BLOCK=131_072, WIDE=False)
    with checked(**last):
        double_kernel[(20_000,)](logits, 128_256, 128_256, BLOCK=131_072, WIDE=True)
    assert logits[-1, :3].tolist() == [2.0, 4.0, 6.0]


def test_the_tolerance_rule() -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    close_to_exact(exact.float(), exact)
    with pytest.raises(AssertionError, match="error"):
        close_to_exact((exact * (1 + 1e-5)).float(), exact)
    close_to_exact((exact * (1 + 1e-5)).float(), exact, (exact * (1 - 1e-5)).float())
    poisoned = exact.float()
    poisoned[3] = torch.nan
    with pytest.raises(AssertionError, match="finite"):
        close_to_exact(poisoned, exact)


def test_the_interpreter_is_as_before() -> None:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    before = (GridExecutor.__call__, InterpreterBuilder.binary_op, InterpreterBuilder.create_masked_load)
    with checked():
        assert GridExecutor.__call__ is not before[0]
    assert (GridExecutor.__call__, InterpreterBuilder.binary_op, InterpreterBuilder.create_masked_load) == before
