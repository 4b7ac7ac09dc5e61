"""Compile every kernel for every GPU generation and say what it became: registers, spills, shared memory, instructions.

    python benchmarks/kernels_aot.py --json benchmarks/results/kernels_aot.json
    python benchmarks/kernels_aot.py --kernel rope gated_silu --target 86 90 --dtype bf16

Needs no GPU. Rows that are in FILE and not asked for stay as they are. Exits with 1 if a row spills without a reason or
needs more shared memory than its card has. bf16 is left out on sm_75, which only emulates it: frugal computes in fp16
there. gfx1100 (AMD) is information: nothing is promised for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
if os.environ.get("TRITON_INTERPRET") == "1":
    raise SystemExit("TRITON_INTERPRET is set: nothing can be compiled in this process.")

import torch
import triton
from torch import Tensor

from benchmarks.attention_cases import ATTENTION_CASES, attention_wanted
from benchmarks.kernel_cases import CASES, DTYPES
from benchmarks.kernel_metrics import AMD_TARGET, TARGETS, compile_launch, meta, target_name

# Rows that may spill, by (kernel, dtype, target), any of them "*": the reason.
REASONS: dict[tuple[str, str, str], str] = {
    ("attention_dq_d128_full", "fp32", "sm_120"): (
        "float32 at head size 128 with window and soft cap is past 255 registers in every tile tried; "
        "training runs in 16 bits"
    ),
}
WIDTHS = ("LDG", "STG")
ALL_CASES = {**CASES, **ATTENTION_CASES}


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return meta(*shape, dtype=dtype)


def wanted(dtype: str, target: int | str) -> bool:
    """Whether the pair is used on real machines."""
    return not (dtype == "bf16" and target == 75)


def reason_for(kernel: str, dtype: str, target: str) -> str:
    """Why the row may spill; empty when it may not."""
    for (k, d, t), reason in REASONS.items():
        if k in ("*", kernel) and d in ("*", dtype) and t in ("*", target):
            return reason
    return ""


def compile_row(kernel: str, dtype: str, target: int | str) -> tuple[dict[str, Any], dict[str, int]]:
    """(row of the matrix, global memory instructions by width)."""
    name = target_name(target)
    launch = ALL_CASES[kernel](DTYPES[dtype], make, name).launch
    metrics = compile_launch(launch, target)
    row = {
        "kernel": kernel,
        "dtype": dtype,
        "target": name,
        "registers": metrics.registers,
        "spill_loads": metrics.spill_loads,
        "spill_stores": metrics.spill_stores,
        "shared_bytes": metrics.shared_bytes,
        "shared_limit_bytes": metrics.shared_limit_bytes,
        "matrix_instructions": metrics.matrix_instructions,
        "reason": reason_for(kernel, dtype, name),
    }
    return row, {k: n for k, n in metrics.widths.items() if k.split(".")[0] in WIDTHS}


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row."""
    label = f"{row['kernel']} {row['dtype']} {row['target']}"
    found = []
    if (row["spill_loads"] or row["spill_stores"]) and not row["reason"] and row["target"] != AMD_TARGET:
        found.append(f"{label}: spills ({row['spill_loads']} loads, {row['spill_stores']} stores)")
    if row["shared_bytes"] > row["shared_limit_bytes"]:
        found.append(f"{label}: {row['shared_bytes']} bytes of shared memory, {row['shared_limit_bytes']} at most")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the matrix here too")
    parser.add_argument("--kernel", nargs="+", choices=list(ALL_CASES), default=list(ALL_CASES))
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--target", nargs="+", default=[*map(str, TARGETS), AMD_TARGET])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    content: dict[str, Any] = {"triton": triton.__version__, "rows": [], "widths": {}}
    if options.json and options.json.exists():
        content |= json.loads(options.json.read_text(encoding="utf-8")) | {"triton": triton.__version__}
    rows = {(r["kernel"], r["dtype"], r["target"]): r for r in content["rows"] if r["kernel"] in ALL_CASES}
    print(f"{'kernel':30} {'dtype':5} {'target':8} {'reg':>4} {'spills':>9} {'shared':>7} {'matrix':>6}  widths")
    wrong: list[str] = []
    for kernel in options.kernel:
        for dtype in options.dtype:
            for text in options.target:
                target: int | str = int(text) if text.isdigit() else text
                if not wanted(dtype, target) or not attention_wanted(kernel, dtype, target):
                    continue
                row, widths = compile_row(kernel, dtype, target)
                key = (kernel, dtype, row["target"])
                rows[key], content["widths"]["/".join(key)] = row, widths
                wrong += faults(row)
                print(f"{kernel:30} {dtype:5} {row['target']:8} {row['registers']!s:>4} "
                      f"{row['spill_loads']!s:>4}/{row['spill_stores']!s:<4} {row['shared_bytes']:7} "
                      f"{row['matrix_instructions']!s:>6}  {widths} {row['reason']}", flush=True)  # fmt: skip
        if options.json:
            content["rows"] = list(rows.values())
            lines = ",\n  ".join(json.dumps(r) for r in content["rows"])
            wide = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in content["widths"].items())
            text = f'{{\n "triton": "{triton.__version__}",\n "rows": [\n  {lines}\n ],\n'
            text += f' "widths": {{\n  {wide}\n }}\n}}\n'
            options.json.write_text(text, encoding="utf-8")
    print("\n".join(["", *wrong, f"{len(rows)} rows, {len(wrong)} wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
