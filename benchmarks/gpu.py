"""Measure frugal on a CUDA GPU: right first, then fast, then small. One call, at most 8 minutes.

    python benchmarks/gpu.py                     # all phases; results in benchmarks/results/gpu_<device>.json and .csv
    python benchmarks/gpu.py --phases kernels    # only some: correctness, kernels, frugal, peer, liger
    python benchmarks/gpu.py --dry-run           # the same logic on the CPU at a tiny size; measures nothing

Phases, each in a process of its own, so that memory caps hold and a crash loses one phase:

1. correctness: the value checks of `frugal doctor`. If one is wrong, nothing is timed.
2. kernels: each Triton kernel, median time (`triton.testing.do_bench`), against torch and a measured roofline.
3. frugal, peer, liger: one QLoRA step of Llama-3.1-8B's shapes, random weights, r = 32 on all linear layers, batch 1:
   peak bytes, bytes per token, tokens/s, and the longest context with the process capped at 8, 12, 16 and 24 GB. peer
   is PEFT + bitsandbytes + SDPA; liger is that with Liger's kernels, if installed.

A row is written as soon as it is measured: what is cut short keeps its results. Exit codes: 0 done, 1 a value is wrong
or a phase failed, 2 no CUDA GPU.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from frugal.files import write_json, write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PHASES = ("correctness", "kernels", "frugal", "peer", "liger")
SHARE = {"correctness": 0.15, "kernels": 0.4, "frugal": 0.5, "peer": 0.65, "liger": 1.0}  # of the time that is left
MARK = "ROW "
GB = 10**9
CAPS = (8, 12, 16, 24)


def main() -> int:
    """Run the phases; see the module's text."""
    asked = arguments()
    if not asked.dry_run and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py needs a CUDA GPU and torch sees none here. `--dry-run` goes through the logic on the "
            "CPU (it measures nothing); `frugal doctor` says what this machine has.",
            file=sys.stderr,
        )
        return 2
    if asked.phase is not None:
        return child(asked)
    deadline = time.time() + asked.seconds
    result: dict[str, Any] = {"environment": environment(asked.dry_run), "rows": [], "phases": {}}
    folder = Path(tempfile.mkdtemp()) if asked.dry_run else RESULTS
    path = asked.out or folder / f"gpu_{slug(result['environment']['device'])}.json"
    failed = False
    for phase in asked.phases:
        left = deadline - time.time()
        if left < 15:
            result["phases"][phase] = "skipped: no time left"
            continue
        if phase == "liger" and importlib.util.find_spec("liger_kernel") is None:
            result["phases"][phase] = "skipped: liger-kernel is not installed"
            continue
        status = run_phase(phase, asked, left * SHARE[phase], result, path)
        result["phases"][phase] = status
        write(result, path)
        failed |= status != "done"
        if phase == "correctness" and status != "done":
            print("a value is wrong (or the checks did not run): nothing is timed", file=sys.stderr)
            break
    write(result, path)
    print(f"wrote {path} and {path.with_suffix('.csv')}: {result['phases']}")
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--seconds", type=float, default=460.0, help="time for everything")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where results go; the CSV lies beside it")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; measures nothing")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_phase(phase: str, asked: argparse.Namespace, seconds: float, result: dict[str, Any], path: Path) -> str:
    """Run one phase in a process, writing its rows as they come. "done", or what went wrong."""
    command = [sys.executable, str(Path(__file__)), "--phase", phase, "--seconds", str(seconds)]
    command += ["--dry-run"] * asked.dry_run
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    killer = threading.Timer(seconds + 20, process.kill)
    killer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            result["rows"].append(json.loads(line.removeprefix(MARK)))
            write(result, path)
        print(line, end="", flush=True)
    code = process.wait()
    killer.cancel()
    return "done" if code == 0 else ("stopped: out of time" if code < 0 else f"failed: exit code {code}")


def child(asked: argparse.Namespace) -> int:
    """One phase in this process; rows go to stdout."""
    end = time.time() + asked.seconds
    device = torch.device("cpu") if asked.dry_run else torch.device("cuda", torch.cuda.current_device())

    def left() -> float:
        return end - time.time()

    if asked.phase == "correctness":
        return correctness()
    from frugal.device import probe, resolve_dtype

    dtype = torch.float32 if asked.dry_run else resolve_dtype("auto", probe()).compute
    if asked.phase == "kernels":
        from benchmarks import gpu_kernels

        dtype = torch.bfloat16 if asked.dry_run else dtype
        gpu_kernels.measure(device, dtype, timer(asked.dry_run), left, emit, dry=asked.dry_run)
        return 0
    try:
        step_phase(asked.phase, device, dtype, left, asked.dry_run)
    except torch.OutOfMemoryError as error:  # a result: this side does not fit this card at all
        emit({"phase": "build", "side": asked.phase, "out_of_memory": True, "why": str(error).splitlines()[0][:200]})
    return 0


def correctness() -> int:
    """The checks of `frugal doctor`; 1 when one is wrong."""
    from frugal.verification import examine

    found = examine()
    for check in found.checks:
        emit({"phase": "correctness", **check.to_json()})
    for choice in found.choices:
        emit({"phase": "choice", "op": choice.key, "implementation": choice.value, "why": choice.reason})
    return 0 if found.passed else 1


def step_phase(name: str, device: torch.device, dtype: torch.dtype, left: Callable[[], float], dry: bool) -> None:
    """One side's QLoRA step; frugal's a second time with its own attention kernel where the device runs it."""
    from benchmarks import gpu_step
    from frugal.device import describe
    from frugal.ops.rows import no_tensor_cores, no_triton

    config = gpu_step.tiny() if dry else gpu_step.llama_8b()
    start = time.time()
    side = gpu_step.build_side(name, config, device, dtype)
    emit({"phase": "build", "side": name, "seconds": time.time() - start, "note": side.note})
    settings: dict[str, Any] = {"multiple": 8 if dry else 256, "repeats": 1 if dry else 3}
    lengths = (32, 64) if dry else (2048, 4096)
    if dry:
        caps = [2 * 10**6, 10**4]
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        caps = [cap * GB for cap in CAPS if cap * GB <= total]
    gpu_step.measure(side, device, lengths, caps, config.vocab_size, left, emit, **settings)
    target = describe(device)
    if name == "frugal" and not dry and left() > 30 and not (no_triton(target, dtype) or no_tensor_cores(target)):
        gpu_step.triton_attention(side)
        gpu_step.measure(side, device, lengths, [], config.vocab_size, left, emit, **settings)


def timer(dry: bool) -> Callable[[Callable[[], Any]], float]:
    """Median seconds of a function: CUDA events with a cleared cache (`do_bench`); one wall time in a dry run."""
    if dry:

        def once(function: Callable[[], Any]) -> float:
            start = time.perf_counter()
            function()
            return max(time.perf_counter() - start, 1e-9)

        return once
    from triton.testing import do_bench

    return lambda function: float(do_bench(function, warmup=10, rep=50, return_mode="median")) / 1000


def emit(row: dict[str, Any]) -> None:
    """One result, for the parent."""
    print(MARK + json.dumps(row), flush=True)


def environment(dry: bool) -> dict[str, Any]:
    """Device, versions, commit."""
    from frugal.manifest import git_commit, versions

    found: dict[str, Any] = {"device": "dry run, CPU", "versions": versions(), "source": git_commit(), "dry_run": dry}
    if not dry:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "total_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def slug(name: str) -> str:
    """A device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def write(result: dict[str, Any], path: Path) -> None:
    """Both files, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    columns = list(dict.fromkeys(key for row in result["rows"] for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["device", *columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"device": result["environment"]["device"], **row} for row in result["rows"])
    write_text(path.with_suffix(".csv"), text.getvalue())


if __name__ == "__main__":
    raise SystemExit(main())
