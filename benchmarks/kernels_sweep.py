"""Choose tile sizes by compiling candidates, and write frugal/ops/tile_table.py.

    python benchmarks/kernels_sweep.py            # all kernels and targets: about a quarter of an hour on one core
    python benchmarks/kernels_sweep.py gated      # only kernels whose name begins so; other rows stay
    python benchmarks/kernels_sweep.py rope --targets 75 86 90

No GPU is needed and nothing is timed. A candidate with spills or too much shared memory is out. Of the others the one
wins that keeps most bytes of loads under way on a multiprocessor (up to 32 KiB, which covers the latency of every card
here), then the one with fewest instructions for a byte, then the smaller tile.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kernel_cases import CASES, Make
from benchmarks.kernel_metrics import Metrics, compile_launch, meta
from frugal.ops.tile_table import TILES

TARGETS = (75, 80, 86, 89, 90, 100, 120)
MAX_WARPS = {75: 32, 80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
SHARED_PER_SM = {75: 65536, 80: 167936, 86: 102400, 89: 102400, 90: 233472, 100: 233472, 120: 102400}
ENOUGH_BYTES = 32768
TABLE = Path(__file__).resolve().parents[1] / "frugal" / "ops" / "tile_table.py"

Tile = dict[str, int]
# Kernel of the table -> (cases that must do well with it, candidates; the first is kept where all are alike).
SPACE: dict[str, tuple[tuple[str, ...], list[Tile]]] = {
    "nf4_dequantize": (("nf4_dequantize_double",), [{"BLOCKS": b, "num_warps": w} for b, w in
                       ((64, 4), (32, 4), (128, 4), (128, 8))]),
    "nf4_lora": (("nf4_lora_double",), [{"BM": m, "BN": n, "BK": 16, "num_warps": w} for m, n, w in
                 ((32, 128, 4), (32, 64, 4), (64, 64, 4), (16, 128, 4))]),
    "rms_norm": (("rms_norm",), [{"TILE": 2048, "num_warps": w} for w in (4, 8, 16)]),
    "rms_norm_backward": (("rms_norm_backward_weight",), [{"TILE": 2048, "num_warps": w} for w in (4, 8, 16)]),
    "rope": (("rope",), [{"TILE": t, "num_warps": w} for t, w in ((2048, 4), (1024, 2), (2048, 8))]),
    "gated": (("gated_gelu",), [{"BLOCK": b, "num_warps": w} for b, w in ((1024, 4), (2048, 4), (2048, 8))]),
    "gated_backward": (("gated_gelu_backward",), [{"BLOCK": b, "num_warps": w} for b, w in
                       ((1024, 4), (2048, 8), (1024, 8))]),
    "cross_entropy": (("cross_entropy_262144_capped",), [{"BLOCK": b, "num_warps": w} for b, w in
                      ((4096, 8), (8192, 8), (8192, 16))]),
    "cross_entropy_once": (("cross_entropy_once_262144_capped",), [{"BLOCK": b, "num_warps": w} for b, w in
                           ((4096, 8), (8192, 8), (8192, 16))]),
    "adam8bit": (("adam8bit",), [{"BLOCKS": b, "num_warps": w} for b, w in ((4, 4), (2, 4), (8, 8))]),
}  # fmt: skip


def score(metrics: Metrics, tile: Tile, target: int) -> tuple[bool, int, float, int]:
    """Larger is better; see the module's text."""
    warps, registers = tile["num_warps"], metrics.registers or 255
    spills = (metrics.spill_loads or 0) + (metrics.spill_stores or 0)
    fits = spills == 0 and metrics.shared_bytes <= metrics.shared_limit_bytes
    blocks = min(
        MAX_WARPS[target] // warps,
        65536 // (-(registers // -8) * 8 * 32 * warps),
        SHARED_PER_SM[target] // (metrics.shared_bytes + 1024),
    )
    loaded = sum(n * int(name.split(".")[1]) // 8 for name, n in metrics.widths.items() if name.startswith("LDG"))
    stored = sum(n * int(name.split(".")[1]) // 8 for name, n in metrics.widths.items() if name.startswith("STG"))
    in_flight = blocks * warps * 32 * loaded
    work = (metrics.instructions or 0) / max(1, loaded + stored)
    size = next(iter(tile.values()))
    return fits, min(in_flight, ENOUGH_BYTES), -round(work, 1), -size


def best(kernel: str, dtype: torch.dtype, target: int) -> Tile:
    names, candidates = SPACE[kernel]
    rows = TILES[f"{kernel}/{8 * dtype.itemsize}"]
    before = rows.get(f"sm_{target}")
    found: list[tuple[tuple[bool, int, float, int], Tile]] = []
    make: Make = lambda *shape, dtype: meta(*shape, dtype=dtype)  # noqa: E731
    for candidate in candidates:
        tile = {**rows["default"], **candidate}
        rows[f"sm_{target}"] = tile
        scores = [score(compile_launch(CASES[n](dtype, make, f"sm_{target}").launch, target), tile, target)
                  for n in names]  # fmt: skip
        found.append((min(scores), tile))
    rows.pop(f"sm_{target}")
    if before is not None:
        rows[f"sm_{target}"] = before
    return max(found, key=lambda pair: pair[0])[1]


def write(key: str, rows: dict[str, Tile], path: Path = TABLE) -> None:
    """Replace one row of the table as it is on disk now; a target without an entry takes the default."""
    kept = {target: tile for target, tile in rows.items() if target == "default" or tile != rows["default"]}
    table = runpy.run_path(str(path))["TILES"] | {key: kept}
    lines = ['"""Written by benchmarks/kernels_sweep.py and attention_sweep.py; change candidates there."""', "",
             "TILES: dict[str, dict[str, dict[str, int]]] = {"]  # fmt: skip
    for name, entry in table.items():
        lines.append(f'    "{name}": {{')
        lines += [f'        "{target}": {tile!r},'.replace("'", '"') for target, tile in entry.items()]
        lines.append("    },")
    path.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def main() -> None:
    """Sweep the kernels that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", metavar="KERNEL", help="beginnings of kernels' names; none: all")
    parser.add_argument("--targets", type=int, nargs="+", choices=TARGETS, default=list(TARGETS))
    arguments = parser.parse_args()
    targets, prefixes = tuple(arguments.targets), arguments.prefixes
    for kernel in SPACE:
        if prefixes and not any(kernel.startswith(p) for p in prefixes):
            continue
        for dtype in (torch.bfloat16, torch.float32):
            key = f"{kernel}/{8 * dtype.itemsize}"
            # Emulated bf16 says nothing about sm_75: there the 16-bit dtype is fp16.
            chosen = {t: best(kernel, torch.float16 if t == 75 and dtype == torch.bfloat16 else dtype, t)
                      for t in targets}  # fmt: skip
            tiles = list(chosen.values())
            default = max(tiles, key=tiles.count)
            TILES[key] = {"default": default, **{f"sm_{t}": v for t, v in chosen.items()}}
            print(key, TILES[key], flush=True)
            write(key, TILES[key])


if __name__ == "__main__":
    main()
