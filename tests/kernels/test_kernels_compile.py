"""Kernels compiled for GPUs that are not here: the committed matrix is sound, and a sample of it is compiled again.

The whole matrix: ``python benchmarks/kernels_aot.py --json benchmarks/results/kernels_aot.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from benchmarks.kernel_cases import CASES, DTYPES, nf4_parts
from benchmarks.kernel_metrics import AMD_TARGET, TARGETS, compile_launch, target_name
from benchmarks.kernels_aot import compile_row, faults, make, wanted
from frugal.ops.weights.triton import prepare_dequantize

MATRIX = json.loads((Path(__file__).parents[2] / "benchmarks/results/kernels_aot.json").read_text(encoding="utf-8"))
ROWS = {(row["kernel"], row["dtype"], row["target"]): row for row in MATRIX["rows"]}
COLUMNS = ["kernel", "dtype", "target", "registers", "spill_loads", "spill_stores", "shared_bytes",
           "shared_limit_bytes", "matrix_instructions", "reason"]  # fmt: skip
# One row of every kernel but twins; dtypes and targets take turns.
SAMPLE = [("nf4_dequantize_double", "bf16", 86), ("nf4_lora_double", "fp16", 75), ("rms_norm", "fp16", 75),
          ("rms_norm_backward_weight", "fp32", 80), ("rope", "bf16", 90), ("gated_silu", "fp16", 89),
          ("gated_gelu_backward", "bf16", 120), ("cross_entropy_32000", "bf16", 86),
          ("cross_entropy_262144_capped", "bf16", 100), ("cross_entropy_once_128256", "bf16", 89),
          ("cross_entropy_once_262144_capped", "fp16", 75), ("adam8bit", "fp32", 120)]  # fmt: skip


def test_the_matrix_is_whole() -> None:
    expected = {(kernel, dtype, target_name(target)) for kernel in CASES for dtype in DTYPES
                for target in (*TARGETS, AMD_TARGET) if wanted(dtype, target)}  # fmt: skip
    assert expected <= set(ROWS), sorted(expected - set(ROWS))[:5]
    assert all(list(row) == COLUMNS for row in MATRIX["rows"])


def test_no_spills_and_shared_memory_within_limits() -> None:
    assert [fault for row in MATRIX["rows"] for fault in faults(row)] == []


def test_memory_is_moved_in_wide_words() -> None:
    """Main loads and stores of element-wise and norm kernels are 128 bits wide."""
    for key, widths in MATRIX["widths"].items():
        kernel, _, target = key.split("/")
        if kernel.startswith(("gated", "rope", "rms_norm_backward", "cross_entropy")) and target != AMD_TARGET:
            assert widths.get("LDG.128", 0) > 0, key
            assert widths.get("STG.128", 0) > 0, key


def test_update_of_low_rank_uses_tensor_cores_in_16_bits() -> None:
    for (kernel, dtype, target), row in ROWS.items():
        if kernel.startswith("nf4_lora") and dtype != "fp32" and target not in ("sm_75", AMD_TARGET):
            assert row["matrix_instructions"] > 0, row


@pytest.mark.parametrize(("kernel", "dtype", "target"), SAMPLE)
def test_nothing_got_worse(kernel: str, dtype: str, target: int) -> None:
    row, widths = compile_row(kernel, dtype, target)
    known = ROWS[kernel, dtype, target_name(target)]
    assert faults(row) == []
    if MATRIX["triton"] != triton.__version__:
        pytest.skip(f"the matrix is of triton {MATRIX['triton']}")

    def better(name: str) -> str:
        return f"{name}: {row[name]}, {known[name]} before. If that is right, run benchmarks/kernels_aot.py again"

    for name in ("spill_loads", "spill_stores", "shared_bytes"):
        assert row[name] <= known[name], better(name)
    assert row["registers"] <= known["registers"] + 8, better("registers")
    assert row["matrix_instructions"] >= known["matrix_instructions"], better("matrix_instructions")
    before: dict[str, Any] = MATRIX["widths"][f"{kernel}/{dtype}/{target_name(target)}"]
    assert widths.get("LDG.128", 0) >= before.get("LDG.128", 0)
    assert widths.get("STG.128", 0) >= before.get("STG.128", 0)


def test_scales_are_never_fused() -> None:
    """Product and sum of double quantisation are rounded one by one: bitsandbytes' bits depend on it."""
    launch = CASES["nf4_dequantize_double"](DTYPES["fp32"], make, "sm_90").launch
    assert compile_launch(launch, 90).fused_multiply_adds == 0


@pytest.mark.parametrize(("dtype", "target"), [("fp16", 75), ("bf16", 86), ("bf16", 90)])
def test_columns_of_nf4_compile_as_rows_do(dtype: str, target: int) -> None:
    """S1: the same kernel with a start in two dimensions."""
    parts = nf4_parts(14336, 4096, make, double=True)
    out = make(14336, 576, dtype=DTYPES[dtype])
    launch = prepare_dequantize(parts, 64, 64 + out.numel(), out, f"sm_{target}", width=576, pitch=4096)
    compiled = compile_launch(launch, target)
    assert compiled.spill_loads == compiled.spill_stores == compiled.fused_multiply_adds == 0
