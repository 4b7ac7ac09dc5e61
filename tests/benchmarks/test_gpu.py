"""benchmarks/gpu.py without a GPU: its logic at a tiny size, its refusal, and its search for the longest context."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_step
from benchmarks.gpu import slug

ROOT = Path(__file__).parents[2]


def start(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = start()
    assert done.returncode == 2
    assert "needs a CUDA GPU" in done.stderr
    assert "--dry-run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    path = tmp_path_factory.mktemp("gpu") / "dry.json"
    done = start("--dry-run", "--out", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text(encoding="utf-8")), path


def rows(result: dict[str, Any], phase: str, **facts: Any) -> list[dict[str, Any]]:
    return [r for r in result["rows"] if r["phase"] == phase and all(r.get(k) == v for k, v in facts.items())]


def test_a_dry_run_goes_through_all_phases(dry: tuple[dict[str, Any], Path]) -> None:
    result, path = dry
    done = {name: status for name, status in result["phases"].items() if name != "liger"}
    assert done == dict.fromkeys(("correctness", "kernels", "frugal", "peer"), "done")
    assert result["environment"]["dry_run"] is True
    assert all(row["passed"] for row in rows(result, "correctness"))
    kernels = {row["kernel"]: row for row in rows(result, "kernel")}
    assert kernels["rms_norm"]["bytes"] == 2 * 8192 * 4096 * 2 + 4096 * 2
    # two causal documents of 4096 tokens, 32 heads of 128, two products: 2 * 2 * 128 * 32 * 2 * (4096 * 4097 / 2)
    assert kernels["attention_d128"]["operations"] == 2 * 2 * 128 * 32 * 4096 * 4097
    assert not any("seconds" in row for row in kernels.values()), "a dry run measures nothing"
    with path.with_suffix(".csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(result["rows"])
    assert {line["device"] for line in lines} == {"dry run, CPU"}


def test_both_sides_have_the_same_weights(dry: tuple[dict[str, Any], Path]) -> None:
    losses = [rows(dry[0], "step", side=side)[0]["first_loss"] for side in ("frugal", "peer")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_slope_and_longest_context(dry: tuple[dict[str, Any], Path]) -> None:
    for side in ("frugal", "peer"):
        short, long = (rows(dry[0], "step", side=side, tokens=n)[0]["peak_bytes"] for n in (32, 64))
        (memory,) = rows(dry[0], "memory", side=side)
        assert memory["bytes_per_token"] == (long - short) / 32
        fits, nothing = rows(dry[0], "context", side=side)
        assert fits["complete"]
        assert 64 < fits["longest_tokens"] < fits["shortest_failed"]
        assert nothing["longest_tokens"] == 0
        assert "fixed part" in nothing["why"]


class FakeMemory:
    """A step takes 1000 + 10 x tokens bytes, plus what no slope foretells from 150 tokens on."""

    def __init__(self) -> None:
        self.side = gpu_step.Side("fake", torch.nn.Identity(), lambda ids: ids.sum(), torch.optim.SGD([torch.ones(1)]))
        self.limit: int | None = None
        self.ran: list[int] = []

    def cap(self, limit: int | None) -> None:
        self.limit = limit

    def clear(self) -> None:
        pass

    def step(self, ids: Tensor) -> tuple[float, int, float]:
        tokens = ids.shape[1]
        self.ran.append(tokens)
        peak = 1000 + 10 * tokens + (300 if tokens > 150 else 0)
        if self.limit is not None and peak > self.limit:
            raise torch.OutOfMemoryError("no")
        return 0.0, peak, 0.1


def search(limit: int, left: float = 1e9) -> tuple[dict[str, Any], list[int]]:
    memory, found = FakeMemory(), []
    gpu_step.longest(memory, lambda n: torch.zeros(1, n), limit, 10.0, 1000.0, 8, 100.0, lambda: left, found.append)  # type: ignore[arg-type]
    assert memory.limit is None, "the cap is lifted"
    return found[0], memory.ran


def test_the_search_goes_down_and_up() -> None:
    down, tried = search(2600)  # foretold 160, which takes 2900
    assert tried == [160, 152, 144]
    assert (down["longest_tokens"], down["shortest_failed"], down["complete"]) == (144, 152, True)
    up, tried = search(2440)  # foretold 144, which fits
    assert tried == [144, 152]
    assert (up["longest_tokens"], up["shortest_failed"]) == (144, 152)


def test_the_search_stops_when_time_is_out() -> None:
    row, tried = search(2440, left=1.0)
    assert tried == []
    assert row["complete"] is False


def test_device_names_as_file_names() -> None:
    assert slug("NVIDIA GeForce RTX 3060 (12 GB)") == "nvidia_geforce_rtx_3060_12_gb"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    done = start("--phases", "correctness", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout[-3000:]
