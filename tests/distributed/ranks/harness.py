"""Several gloo ranks on this machine, for tests: `run_cases(folder, "cases_x", ["a", "b"], world=2)["a"]`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@dataclass
class Outcome:
    """What the ranks of one case returned."""

    world: int
    folder: Path
    reports: list[dict[str, Any]]
    """What each rank's function returned, in order of rank; of a `lost_` case only those of ranks that returned."""

    def tensors(self, rank: int, name: str = "") -> dict[str, torch.Tensor]:
        """What that rank saved."""
        return load_file(self.folder / f"{rank}{'.' + name if name else ''}.safetensors")


@dataclass
class Outcomes:
    """The cases of `run_cases`; asking for one that failed fails the test with every rank's error."""

    found: dict[str, Outcome] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, case: str) -> Outcome:
        if case in self.failed:
            raise AssertionError(f"case {case}:\n{self.failed[case]}")
        return self.found[case]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def group_environment(world: int, **more: str) -> dict[str, str]:
    """The environment that torchrun gives, without RANK and LOCAL_RANK."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def run_cases(
    folder: Path, module: str, cases: list[str], *, world: int = 2, timeout: float = 400, **environment: str
) -> Outcomes:
    """Run `case_<name>(rank)` of <module>.py for each name, in ``world`` ranks that are started once.

    After a case that failed the ranks are started anew for those that are left. ``timeout``: seconds for all of them.
    Cases `lost_<name>` may lose ranks; each has ranks of its own.
    """
    launcher = subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), str(folder), str(world), f"{__package__}.{module}", *cases],
        env=group_environment(world, **environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, text = launcher.communicate(timeout=timeout)
        ended = f"the launch ended with {launcher.returncode}\n{text[-3000:]}"
    except subprocess.TimeoutExpired:
        ended = f"the launch took longer than {timeout} s"
    finally:
        launcher.kill()  # and with it the ranks: each asked the kernel for that
        launcher.wait()
    outcomes = Outcomes()
    for case in cases:
        files = [folder / case / f"{rank}.json" for rank in range(world)]
        present = [file for file in files if file.exists()]
        if present == files or (present and case.startswith("lost_")):
            reports = [json.loads(file.read_text(encoding="utf-8")) for file in present]
            outcomes.found[case] = Outcome(world, folder / case, reports)
        else:
            outcomes.failed[case] = f"{ended}\n{_errors(folder, case, world)}"
    return outcomes


def _errors(folder: Path, case: str, world: int) -> str:
    """The traceback of every rank, and what the ranks printed since they were started."""
    place = folder / case
    first = place / "first"
    started = folder / (first.read_text(encoding="utf-8") if first.exists() else case)
    parts = []
    for rank in range(world):
        for path in (place / f"{rank}.error", started / f"{rank}.log"):
            if path.exists():
                text = path.read_text(encoding="utf-8", errors="replace")
                parts.append(f"--- rank {rank}, {path.suffix}\n{text[-3000:]}")
    return "\n".join(parts)
