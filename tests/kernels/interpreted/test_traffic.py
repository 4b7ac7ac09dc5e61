"""Kernels bound by memory load their inputs once and store their outputs once, within 10 %."""

from __future__ import annotations

import pytest

from benchmarks.kernel_cases import CASES
from benchmarks.kernels_traffic import LIMIT, measure

# Label smoothing and losses without a gradient take this kernel for long rows too, and read them twice; all
# others read once ("cross_entropy_once").
READ_TWICE = {("cross_entropy_128256", "bf16"), ("cross_entropy_128256", "fp32"), ("cross_entropy_32000", "fp32"),
              ("cross_entropy_262144_capped", "bf16"), ("cross_entropy_262144_capped", "fp32")}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kernel", [name for name in CASES if not name.startswith("attention")])
def test_traffic(kernel: str, dtype: str) -> None:
    row = measure(kernel, dtype)
    assert 0.99 < row.ratio_to_least <= LIMIT, row
    assert (row.ratio > LIMIT) == ((kernel, dtype) in READ_TWICE), row
    assert row.ratio <= 1.51
