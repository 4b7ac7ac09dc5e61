"""One QLoRA step, frugal against TRL and against plain PEFT: peak live bytes and seconds, side by side.

`trl` is TRL's SFTTrainer over PEFT + bitsandbytes, whose loss builds no logits: the strongest peer. Without a GPU its
head runs in a torch form that holds several tiles of [tokens, 32768] where its kernels hold one; `trl_kernel` counts
that one in their place (computed, not run). It keeps adapters in bfloat16. `peer` is the same model with transformers'
own loss.

    python benchmarks/peer_step.py --json out.json          # SmolLM2-135M, batches 2 x 512, 2 x 1024, 1 x 4096
    python benchmarks/peer_step.py --quick                  # short rows, one repeat: does it run

Memory and time are taken in separate steps (the meter slows a step down). `floor_ratio` is frugal's time over that of
the products alone that a step cannot do without: each linear layer forward and for the gradient of its input, the
adapters' products, and the head; with all weights dense and nothing computed twice. The adapters' products are counted
at the rate of their layer's: some CPUs take a slow path for such thin ones, which is no floor. Where the floor is not
below a step even so, it is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RANK, Side, environment, frugal_side, interleaved, peer_side, random_batch, trl_side
from torch import Tensor
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from frugal.files import write_json
from frugal.memory.meter_report import MeterReport
from frugal.units import MIB

CASES = [(2, 512), (2, 1024), (1, 4096)]
QUICK_CASES = [(2, 64), (2, 128), (1, 256)]

# Per layer: (inputs, outputs) of q, k, v, o, gate, up, down; then the head, which has no adapter.
HIDDEN, MLP, KV, LAYERS, VOCAB = 576, 1536, 192, 30, 49152
LINEARS = [(HIDDEN, HIDDEN), (HIDDEN, KV), (HIDDEN, KV), (HIDDEN, HIDDEN), (HIDDEN, MLP), (HIDDEN, MLP), (MLP, HIDDEN)]


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--quick", action="store_true", help="short rows, one repeat")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each side and case (4096: a third)")
    parser.add_argument("--stock-modules", action="store_true", help="frugal without its replaced modules")
    arguments = parser.parse_args()
    result = measure(
        QUICK_CASES if arguments.quick else CASES,
        repeats=1 if arguments.quick else arguments.repeats,
        fused=not arguments.stock_modules,
    )
    print(summary(result))
    if arguments.json is not None:
        write_json(arguments.json, result)
    else:
        print(json.dumps({key: value for key, value in result.items() if key.endswith("ratio")}, indent=2))


def measure(cases: list[tuple[int, int]], *, repeats: int, fused: bool = True) -> dict[str, Any]:
    """All cases; the first two give the slopes."""
    ours = frugal_side(fused=fused)
    sides = [ours, trl_side(), peer_side()]
    rows: list[dict[str, Any]] = []
    for batch_size, tokens in cases:
        batch = random_batch(batch_size, tokens)
        losses = {side.name: probe_loss(side, batch) for side in sides}
        row: dict[str, Any] = {"batch": batch_size, "tokens": tokens, "loss": losses}
        reports = {side.name: side.meter(batch) for side in sides}
        seconds = interleaved(sides, batch, repeats if tokens <= 1024 else max(1, repeats // 3))
        reports["trl_kernel"] = reports["trl"]
        seconds["trl_kernel"] = {}
        for name, report in reports.items():
            row[name] = {"peak_bytes": report.peak_bytes, **seconds[name], "at_peak": report.by_category}
        row["trl_kernel"]["peak_bytes"] = kernel_form(reports["trl"], batch_size * (tokens - 1))
        row["floor_seconds"], row["floor_cpu_seconds"] = floor_seconds(batch_size * tokens)
        rows.append(row)
        print(f"{batch_size} x {tokens}: {row}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ours.checkpoint("disk", Path(folder))
        for row in rows[:2]:
            batch = random_batch(row["batch"], row["tokens"])
            report = ours.meter(batch)
            row["frugal_disk"] = {
                "peak_bytes": report.peak_bytes,
                **interleaved([ours], batch, 1)["frugal"],
                "at_peak": report.by_category,
            }
        ours.checkpoint("none")
    return {"cases": rows, **ratios(rows), "environment": environment()}


def kernel_form(report: MeterReport, positions: int) -> int:
    """TRL's peak with the temporaries that its Triton kernels need in place of those of its torch form.

    One tile of logits that becomes their gradient in place; the gradient of the hidden states, twice while it is cast.
    """
    tile = min(positions, TOKEN_CHUNK_SIZE) * _CHUNKED_LOGPROB_CHUNK_SIZE
    return report.peak_bytes - report.by_category["temporaries"] + 4 * (tile + 2 * positions * HIDDEN)


def probe_loss(side: Side, batch: dict[str, Tensor]) -> float:
    """The loss before any step of this case, to see that all sides compute the same thing."""
    with torch.no_grad():
        return float(side.loss(batch))


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the goals are stated in, against TRL (`trl_`) and against plain PEFT; peak (`_second`: at the second case),
    seconds and floor at the first case."""
    first, second = rows[0], rows[1]
    further = second["batch"] * second["tokens"] - first["batch"] * first["tokens"]

    def slope(side: str) -> float:
        return float(second[side]["peak_bytes"] - first[side]["peak_bytes"]) / further

    found = {}
    for name, prefix in (("trl", "trl_"), ("trl_kernel", "trl_kernel_"), ("peer", "")):
        found |= {
            f"{prefix}peak_ratio": first["frugal"]["peak_bytes"] / first[name]["peak_bytes"],
            f"{prefix}peak_ratio_disk": first["frugal_disk"]["peak_bytes"] / first[name]["peak_bytes"],
            f"{prefix}peak_ratio_second": second["frugal"]["peak_bytes"] / second[name]["peak_bytes"],
            f"{prefix}peak_ratio_disk_second": second["frugal_disk"]["peak_bytes"] / second[name]["peak_bytes"],
            f"{prefix}slope_ratio": slope("frugal") / slope(name),
            f"{prefix}slope_ratio_disk": slope("frugal_disk") / slope(name),
            f"{name}_bytes_per_token": slope(name),
        }
        if "seconds" in first[name]:
            found |= {
                f"{prefix}seconds_ratio": first["frugal"]["seconds"] / first[name]["seconds"],
                f"{prefix}cpu_seconds_ratio": first["frugal"]["cpu_seconds"] / first[name]["cpu_seconds"],
            }
    return {
        **found,
        **floor_ratios(first),
        "frugal_bytes_per_token": slope("frugal"),
        "frugal_disk_bytes_per_token": slope("frugal_disk"),
    }


def floor_ratios(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step over those of its floor; nothing where the machine computes the floor's products so badly that
    a whole step takes no longer."""
    found = {
        "floor_ratio": row["frugal"]["seconds"] / row["floor_seconds"],
        "peer_floor_ratio": row["peer"]["seconds"] / row["floor_seconds"],
        "cpu_floor_ratio": row["frugal"]["cpu_seconds"] / row["floor_cpu_seconds"],
    }
    if min(found.values()) > 1:
        return found
    print(f"The floor of {row['floor_seconds']:.2f} s is not below a step's time: no floor on this machine, left out.")
    return {}


def floor_seconds(tokens: int, repeats: int = 3) -> tuple[float, float]:
    """Wall and CPU seconds of the products that one step of ``tokens`` tokens needs, with dense float32 weights."""
    wall, cpu = _linear_seconds(tokens, HIDDEN, VOCAB, repeats)
    for inputs, outputs in set(LINEARS):
        # An adapter's six products are three with A and three with B; the layer's own are two with W.
        adapter = 1 + 3 * RANK * (inputs + outputs) / (2 * inputs * outputs)
        count = LINEARS.count((inputs, outputs)) * LAYERS * adapter
        one_wall, one_cpu = _linear_seconds(tokens, inputs, outputs, repeats)
        wall, cpu = wall + count * one_wall, cpu + count * one_cpu
    return wall, cpu


@torch.no_grad()
def _linear_seconds(tokens: int, inputs: int, outputs: int, repeats: int) -> tuple[float, float]:
    """Median time of y = x W^T and dx = dy W. The head goes by chunks of tokens, so that its logits fit."""
    chunk = min(tokens, 1024)
    x, dy, weight = torch.randn(chunk, inputs), torch.randn(chunk, outputs), torch.randn(outputs, inputs)
    times = []
    for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        torch.mm(x, weight.t())
        torch.mm(dy, weight)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    scale = tokens / chunk
    return statistics.median(w for w, _ in times[1:]) * scale, statistics.median(c for _, c in times[1:]) * scale


def summary(result: dict[str, Any]) -> str:
    """The result as a small table."""
    sides = ("frugal", "frugal_disk", "trl", "trl_kernel", "peer")
    heads = ("frugal", "disk", "TRL", "its kernel", "PEFT", "frugal s", "TRL s", "PEFT s", "floor s")
    lines = [f"{'MiB':<12}" + "".join(f"{head:>11}" for head in heads)]
    for row in result["cases"]:
        peaks = [f"{row[side]['peak_bytes'] / MIB:.1f}" if side in row else "" for side in sides]
        times = [row["frugal"]["seconds"], row["trl"]["seconds"], row["peer"]["seconds"], row["floor_seconds"]]
        cells = [*peaks, *(f"{seconds:.2f}" for seconds in times)]
        lines.append(f"{row['batch']:>3} x {row['tokens']:<6}" + "".join(f"{cell:>11}" for cell in cells))
    lines += [f"{key:<28}{value:12.3f}" for key, value in result.items() if isinstance(value, float)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
