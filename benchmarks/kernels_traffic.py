"""Bytes a kernel loads and stores, counted in Triton's interpreter at real shapes, against its inputs and outputs once.

    python benchmarks/kernels_traffic.py [--json FILE] [--csv FILE] [--dtype bf16]

A few programs of the real grid run on sparse memory and are set against their share of the ideal. What is counted is
what programs ask for; caches can only make it less.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from benchmarks.kernel_cases import CASES, DTYPES
from tests.kernels.support import checked, sparse_empty

LIMIT = 1.10


@dataclass(frozen=True)
class Traffic:
    """Of one kernel; bytes of the whole launch."""

    kernel: str
    dtype: str
    bytes_counted: int
    bytes_ideal: int
    ratio: float
    ratio_to_least: float
    """Against what the algorithm must move where that is more than inputs and outputs once."""
    bytes_from_shared_small_inputs: int
    """Loads of inputs that the second-level cache keeps; not in ``bytes_counted``."""
    note: str


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros that takes no memory until it is touched."""
    return sparse_empty(shape, dtype)


def measure(kernel: str, dtype: str, sample: int = 2) -> Traffic:
    """Count ``sample`` programs of the launch and scale to the grid."""
    case = CASES[kernel](DTYPES[dtype], make, None)
    launch = case.launch

    def some(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        every = grid[0] * grid[1] * grid[2]
        chosen = [every * i // sample for i in range(sample)]
        return [(i % grid[0], i // grid[0] % grid[1], i // (grid[0] * grid[1])) for i in chosen]

    with checked(programs=some, poison=False, races=False, resident=case.resident) as report:
        launch.run()
    total = 1
    for size in launch.grid:
        total *= size
    counted = report.bytes * total / sample
    least = case.least_bytes or case.ideal_bytes
    note = "read twice: only with label smoothing, else cross_entropy_once" if case.least_bytes else ""
    if case.resident:
        note = "apart: tables" if len(case.resident) < 3 else "apart: A, B, tables"
    return Traffic(
        kernel, dtype, round(counted), case.ideal_bytes, round(counted / case.ideal_bytes, 4),
        round(counted / least, 4), round(report.resident * total / sample), note,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["bf16", "fp32"])
    options = parser.parse_args()
    rows = []
    print(f"{'kernel':32} {'dtype':5} {'counted':>14} {'ideal':>14} {'ratio':>7}  note")
    for kernel in CASES:
        for dtype in options.dtype:
            row = measure(kernel, dtype)
            rows.append(asdict(row))
            print(f"{kernel:32} {dtype:5} {row.bytes_counted:14,} {row.bytes_ideal:14,} {row.ratio:7.3f}  {row.note}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
