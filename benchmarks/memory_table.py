"""Where the peak of one QLoRA step is: live bytes by category and by allocation site, from the meter.

python benchmarks/memory_table.py                                  # SmolLM2-135M, 2 x 512, recompute
python benchmarks/memory_table.py --batch 1 --tokens 4096 --policy disk --json out.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import environment, frugal_side, peer_side, random_batch

from frugal.files import write_json
from frugal.memory.meter_report import MeterReport
from frugal.units import MIB, gib


def main() -> None:
    """Measure one step and print it as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--policy", choices=["none", "recompute", "offload", "disk"], default="recompute")
    parser.add_argument("--peer", action="store_true", help="PEFT + bitsandbytes + transformers instead")
    parser.add_argument("--stock-modules", action="store_true", help="frugal without its replaced modules")
    parser.add_argument("--sites", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        side = peer_side() if arguments.peer else frugal_side(fused=not arguments.stock_modules)
        if not arguments.peer:
            side.checkpoint(arguments.policy, Path(folder))
        report = side.meter(random_batch(arguments.batch, arguments.tokens))
        if not arguments.peer:
            side.checkpoint("none")
    print(markdown(report, arguments.sites))
    if arguments.json is not None:
        case = {key: getattr(arguments, key) for key in ("batch", "tokens", "policy", "peer")}
        write_json(arguments.json, {**case, **report.to_dict(), "environment": environment()})


def markdown(report: MeterReport, sites: int) -> str:
    """Categories and the largest sites as Markdown tables."""
    lines = [
        f"Peak {gib(report.peak_bytes)}, reached at `{report.peak_op}`.",
        "",
        "| what | MiB |",
        "|---|---:|",
    ]
    lines += [f"| {name} | {count / MIB:.1f} |" for name, count in report.by_category.items()]
    lines += ["", "| MiB | tensors | what | module | operation |", "|---:|---:|---|---|---|"]
    lines += [
        f"| {s.bytes / MIB:.1f} | {s.tensors} | {s.category} | {s.module or '-'} | {s.op} |"
        for s in report.sites[:sites]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
