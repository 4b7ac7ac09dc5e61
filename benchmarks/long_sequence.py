"""One QLoRA step over one long row of SmolLM2-135M: resident memory of the process, and seconds.

    python benchmarks/long_sequence.py --tokens 16384 --policy disk --json out.json

Resident memory is what the operating system counts at its highest (`ru_maxrss`), libraries and model included; it is
read before the step too. `--layers` keeps only the first layers, for a quick look.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import environment, frugal_side, random_batch

from frugal.files import write_json
from frugal.units import gib


def peak_resident_bytes() -> int:
    """The highest resident size of this process so far. Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="length of the row")
    parser.add_argument("--policy", choices=("recompute", "offload", "disk"), default="recompute")
    parser.add_argument("--layers", type=int, help="keep only the first layers")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()

    side = frugal_side("none")
    if arguments.layers is not None:
        decoder = side.model.get_base_model().model  # type: ignore[operator]
        decoder.layers = torch.nn.ModuleList(list(decoder.layers)[: arguments.layers])
    before = peak_resident_bytes()
    with tempfile.TemporaryDirectory() as folder:
        side.checkpoint(arguments.policy, Path(folder))
        start = time.perf_counter()
        loss = side.step(random_batch(1, arguments.tokens))
        seconds = time.perf_counter() - start
        side.checkpoint("none")
    result: dict[str, Any] = {
        "tokens": arguments.tokens,
        "policy": arguments.policy,
        "layers": arguments.layers or "all",
        "loss": loss,
        "seconds": seconds,
        "resident_before_bytes": before,
        "resident_peak_bytes": peak_resident_bytes(),
        "environment": environment(),
    }
    print(
        f"{result['tokens']:,} tokens, {result['policy']}: {seconds:.0f} s, resident "
        f"{gib(result['resident_peak_bytes'])} at most ({gib(before)} before the step), loss {loss:.4f}"
    )
    if arguments.json is not None:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
