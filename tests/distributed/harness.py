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
ROOT = HERE.parent.parent


@dataclass
class Outcome:
    """What the ranks of one case returned."""

    world: int
    folder: Path
    reports: list[dict[str, Any]]
    """What each rank's function returned, in order of rank."""

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
    """Run `case_<name>(rank)` of tests/distributed/<module>.py for each name, in ``world`` ranks started once.

    After a case that failed the ranks are started anew for those that are left. ``timeout``: seconds of a launch.
    """
    outcomes = Outcomes()
    left = list(cases)
    while left:
        place = folder / f"launch-{len(outcomes.found) + len(outcomes.failed)}"
        place.mkdir(parents=True)
        ended = _launch(place, module, left, world, timeout, environment)
        for case in list(left):
            files = [place / case / f"{rank}.json" for rank in range(world)]
            if not all(file.exists() for file in files):
                break
            reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
            outcomes.found[case] = Outcome(world, place / case, reports)
            left.remove(case)
        if left:
            outcomes.failed[left.pop(0)] = f"{ended}\n{_errors(place, world)}"
    return outcomes


def _launch(place: Path, module: str, cases: list[str], world: int, timeout: float, environment: dict[str, str]) -> str:
    python_path = os.pathsep.join([str(HERE), str(HERE.parent / "train"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), str(place), str(world), module, *cases],
        env=group_environment(world, PYTHONPATH=python_path, **environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, text = launcher.communicate(timeout=timeout)
        return f"the launch ended with {launcher.returncode}\n{text[-3000:]}"
    except subprocess.TimeoutExpired:
        return f"the launch took longer than {timeout} s"
    finally:
        launcher.kill()  # and with it the ranks: each asked the kernel for that
        launcher.wait()


def _errors(place: Path, world: int) -> str:
    parts = []
    for rank in range(world):
        for path in [*sorted(place.glob(f"*/{rank}.error")), place / f"{rank}.log"]:
            if path.exists():
                parts.append(
                    f"--- rank {rank}, {path.name}\n{path.read_text(encoding='utf-8', errors='replace')[-3000:]}"
                )
    return "\n".join(parts)
