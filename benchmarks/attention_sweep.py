"""Choose the attention kernels' tiles by compiling candidates for every target; writes frugal/ops/tile_table.py.

    python benchmarks/attention_sweep.py [--targets 86 120] [--only attention_dkdv_d128]

The first candidate, best first, that fits the card's shared memory and spills no register is taken, for the plain form
and the one with window and soft cap (the compiler may spill in either). No GPU is
needed, so the order of the candidates is judgement (larger tiles do more arithmetic for each byte of shared memory),
not a measurement. Entries of targets that were not asked for are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.attention_cases import KERNELS, Form, launch_of
from benchmarks.kernel_metrics import SHARED_LIMIT, compile_launch, meta, target_name
from benchmarks.kernels_sweep import write
from frugal.ops.rows import MAX_HEAD_SIZE
from frugal.ops.tile_table import TILES

TARGETS = (80, 86, 89, 90, 100, 120)
SIZES = (64, 128, 256)
# (BM, BN, num_warps, num_stages), best first.
CANDIDATES: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("attention", 64): [(128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)],
    ("attention", 128): [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2)],
    ("attention", 256): [(64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1)],
    ("attention_dq", 64): [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
    ("attention_dq", 128): [(64, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
    ("attention_dq", 256): [(64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)],
    ("attention_dkdv", 64): [(64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2)],
    ("attention_dkdv", 128): [(32, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1)],
    ("attention_dkdv", 256): [(32, 32, 8, 2), (32, 32, 8, 1), (16, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)],
}  # fmt: skip
# float32 takes twice the shared memory and registers.
CANDIDATES_32: dict[int, list[tuple[int, int, int, int]]] = {
    64: [(32, 32, 8, 1), (32, 32, 4, 1), (16, 32, 4, 1)],
    128: [(32, 32, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)],
}


FULL: dict[str, Any] = {"window": 4096, "softcap": 30.0}  # the form that needs most registers


def least_shared(kernel: str, size: int, dtype: torch.dtype, bm: int, bn: int, stages: int) -> int:
    """Bytes that the tiles alone take: what stays, and what is loaded ahead. Saves compiling what cannot fit."""
    stays, moves = {"attention": (bm, 2 * bn), "attention_dq": (2 * bm, 2 * bn)}.get(kernel, (2 * bn, 2 * bm))
    return (stays + (stages - 1) * moves) * size * dtype.itemsize


def choose_tile(kernel: str, size: int, dtype: torch.dtype, target: int) -> dict[str, int]:
    """The first candidate that fits in the most demanding form; the least spilling launchable one when none does."""
    fallback: tuple[int, dict[str, int]] | None = None
    candidates = CANDIDATES[kernel, size] if dtype.itemsize == 2 else CANDIDATES_32[size]
    for bm, bn, warps, stages in candidates:
        sizes = {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}
        if least_shared(kernel, size, dtype, bm, bn, stages) > SHARED_LIMIT[target]:
            continue
        found = [compile_launch(launch_of(kernel, form, dtype, meta, sizes=sizes)[0], target)
                 for form in (Form(size, **FULL), Form(size))]  # fmt: skip
        metrics = max(found, key=lambda m: (m.spill_loads or 0) + (m.spill_stores or 0))
        spills = (metrics.spill_loads or 0) + (metrics.spill_stores or 0)
        print(f"{kernel}_d{size}/{8 * dtype.itemsize} sm_{target} {sizes} registers {metrics.registers} "
              f"spills {spills} shared {metrics.shared_bytes}/{metrics.shared_limit_bytes}", flush=True)  # fmt: skip
        if metrics.shared_bytes > metrics.shared_limit_bytes:
            continue
        if not spills:
            return sizes
        if fallback is None or spills < fallback[0]:
            fallback = (spills, sizes)
    if fallback is None:
        raise RuntimeError(f"no candidate of {kernel} at head size {size} fits sm_{target}: add a smaller one")
    return fallback[1]


def main() -> None:
    """Sweep, writing the table after each entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--only", nargs="+", metavar="KERNEL_dSIZE/BITS", help="rows of the table to choose anew")
    asked = parser.parse_args()
    for dtype in (d for d in (torch.bfloat16, torch.float32) if 8 * d.itemsize in asked.bits):
        for kernel in KERNELS:
            for size in SIZES:
                key = f"{kernel}_d{size}/{8 * dtype.itemsize}"
                if (asked.only and key not in asked.only) or size > MAX_HEAD_SIZE[dtype]:
                    continue
                known = TILES.get(key, {})
                rows = {target_name(t): known.get(target_name(t), known["default"]) for t in TARGETS if known}
                for target in asked.targets:
                    rows[target_name(target)] = choose_tile(kernel, size, dtype, target)
                # Other devices, the interpreter among them: the smallest card's.
                write(key, {"default": rows.get("sm_86", next(iter(rows.values()))), **rows})


if __name__ == "__main__":
    main()
