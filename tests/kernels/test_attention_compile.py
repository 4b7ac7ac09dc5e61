"""Attention compiled for GPUs that are not here: the matrix is sound, tensor cores are used, tiles fit each card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from benchmarks.attention_cases import ATTENTION_CASES, KERNELS, attention_wanted
from benchmarks.kernel_cases import DTYPES
from benchmarks.kernel_metrics import AMD_TARGET, SHARED_LIMIT, TARGETS, target_name
from benchmarks.kernels_aot import compile_row, faults, wanted
from frugal.ops.rows import COMPILED_FOR, MAX_HEAD_SIZE
from frugal.ops.tile_table import TILES

MATRIX = json.loads((Path(__file__).parents[2] / "benchmarks/results/kernels_aot.json").read_text(encoding="utf-8"))
ROWS = {(r["kernel"], r["dtype"], r["target"]): r for r in MATRIX["rows"] if r["kernel"] in ATTENTION_CASES}


def test_rows_are_sound() -> None:
    assert [fault for row in ROWS.values() for fault in faults(row)] == []
    for kernel in KERNELS:
        compiled = {target for name, dtype, target in ROWS if name == f"{kernel}_d64" and dtype == "bf16"}
        assert compiled == {*COMPILED_FOR[1:], AMD_TARGET}, "what `frugal doctor` says"


def test_the_matrix_is_whole() -> None:
    expected = {(kernel, dtype, target_name(target)) for kernel in ATTENTION_CASES for dtype in DTYPES
                for target in (*TARGETS, AMD_TARGET)
                if wanted(dtype, target) and attention_wanted(kernel, dtype, target)}  # fmt: skip
    missing = expected - set(ROWS)
    names = " ".join(sorted({kernel for kernel, *_ in missing}))
    assert not missing, f"{len(missing)} rows are not compiled yet: kernels_aot.py --json ... --kernel {names}"


def test_tensor_cores_are_used_everywhere() -> None:
    """Without them a product is single multiply-adds: the reason why attention is never Triton on sm_75."""
    for key, row in ROWS.items():
        assert row["matrix_instructions"] > 0, key


def test_operands_are_read_in_wide_words() -> None:
    """128 bits straight into shared memory (LDGSTS, TMA) or through registers (LDG)."""
    for (kernel, dtype, target), row in ROWS.items():
        if target != AMD_TARGET:
            widths = MATRIX["widths"][f"{kernel}/{dtype}/{target}"]
            narrow = sum(n for name, n in widths.items() if name in ("LDG.8", "LDG.16"))
            assert narrow == 0, (row, widths)


def test_every_tile_is_in_the_table_and_holds_its_operands() -> None:
    for kernel in KERNELS:
        for dtype in DTYPES.values():
            for size in (64, 128, 256):
                if size > MAX_HEAD_SIZE[dtype]:
                    continue
                rows = TILES[f"{kernel}_d{size}/{8 * dtype.itemsize}"]
                for target in COMPILED_FOR[1:]:
                    tile = rows.get(target, rows["default"])
                    limit = SHARED_LIMIT[int(target.removeprefix("sm_"))]
                    kept = tile["BM"] if kernel == "attention" else 2 * tile["BN" if "dkdv" in kernel else "BM"]
                    assert kept * size * dtype.itemsize < limit, (kernel, target)


@pytest.mark.parametrize(
    ("kernel", "dtype", "target"),
    [("attention_d128", "bf16", 86), ("attention_dkdv_d128_full", "bf16", 80), ("attention_dq_d64", "fp32", 90)],
)
def test_nothing_got_worse(kernel: str, dtype: str, target: int) -> None:
    row, _ = compile_row(kernel, dtype, target)
    assert faults(row) == []
    known = ROWS.get((kernel, dtype, target_name(target)), row)
    if MATRIX["triton"] != triton.__version__:
        pytest.skip(f"the matrix is of triton {MATRIX['triton']}")
    assert row["shared_bytes"] <= known["shared_bytes"]
    assert row["registers"] <= known["registers"] + 8
    assert row["matrix_instructions"] >= known["matrix_instructions"]
