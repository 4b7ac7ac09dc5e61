"""`accelerate launch` with each file of configs/accelerate, and torchrun: what one process trains, and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from frugal.checkpoints.complete import find_latest
from frugal.exports.registry import merge
from frugal.files import read_json
from frugal.run.train import train
from frugal.training.log import read_log
from tests.distributed.ranks.harness import ROOT
from tests.distributed.ranks.launched_runs import (
    ENVIRONMENT,
    WITH_DEEPSPEED,
    Runs,
    accelerate_launch,
    launched,
    same,
    torchrun,
)

STRATEGIES = ["ddp", "fsdp2", *(pytest.param(name, marks=WITH_DEEPSPEED) for name in ("zero2", "zero3"))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_tiny_llama: Callable[..., Path]) -> Runs:
    return Runs(tmp_path_factory.mktemp("launchers"), make_tiny_llama(tie_word_embeddings=False))


@pytest.mark.parametrize("name", STRATEGIES)
def test_accelerate_launch_then_one_process_then_merge(made: Runs, name: str) -> None:
    """Two processes, stopped halfway as it were, one goes on; everything is what one process does alone."""
    launched(accelerate_launch(name, "train", str(made.file(name))))
    two = made.root / name
    same(two, made.one)
    assert read_json(two / "manifest.json")["device"]["processes"] == 2
    assert read_json(two / "manifest.json")["implementations"]["strategy"]["chosen"] == name

    folder = made.root / f"{name}-on-one"
    folder.mkdir()
    shutil.copytree(two / "checkpoint-3", folder / "checkpoint-3")
    shutil.copy(two / "train_log.jsonl", folder)
    train(made.config(f"{name}-on-one"), resume=True)
    same(folder, made.one)
    merge(folder, made.root / f"{name}-merged", dtype="float32")
    if not (made.root / "one-merged").exists():
        merge(made.one, made.root / "one-merged", dtype="float32")
    a, b = (load_file(made.root / f"{each}-merged" / "model.safetensors") for each in (name, "one"))
    assert a.keys() == b.keys()
    for key, tensor in a.items():
        torch.testing.assert_close(tensor, b[key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["fsdp2_offload", pytest.param("zero3_offload", marks=WITH_DEEPSPEED)])
def test_offload(made: Runs, name: str) -> None:
    launched(accelerate_launch(name, "train", str(made.file(name))))
    same(made.root / name, made.one)


def test_torchrun_with_a_strategy_of_the_configuration(made: Runs) -> None:
    text = launched(
        torchrun("train", str(made.file("torchrun")), "distributed.strategy=fsdp2", "distributed.shard_base=true")
    )
    same(made.root / "torchrun", made.one)
    assert "2 processes, fsdp2" in text


def test_a_launcher_that_starts_one_process_is_refused(made: Runs) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "frugal"),
            *("train", str(made.file("alone"))),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode != 0
    assert "accelerate launch was asked for several processes and started one" in done.stderr
    assert not (made.root / "alone").exists()


def test_two_engines_are_a_contradiction(made: Runs) -> None:
    command = accelerate_launch("fsdp2", "train", str(made.file("both")), "distributed.strategy=ddp")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT, check=False)
    assert done.returncode != 0
    assert "distributed.strategy: ddp, but accelerate was started for fsdp2" in done.stderr


class Started:
    """A launcher that runs, and its ranks."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.log = folder / "train_log.jsonl"
        self.output = folder.parent / f"{folder.name}.txt"
        with open(self.output, "w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=ROOT)

    def wait_for_steps(self, count: int, timeout: float = 200) -> None:
        until = time.monotonic() + timeout
        while not (self.log.exists() and len(read_log(self.log)) >= count):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < until, self.text()
            time.sleep(0.05)

    def rank(self, number: int) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if child.environ().get("RANK") == str(number):
                return child
        raise AssertionError(f"no rank {number}: {self.text()}")

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")[-6000:]


@pytest.fixture
def start() -> Iterator[Callable[[list[str], Path], Started]]:
    started: list[Started] = []

    def begin(command: list[str], folder: Path) -> Started:
        started.append(Started(command, folder))
        return started[-1]

    yield begin
    for one in started:
        left = psutil.Process(one.process.pid).children(recursive=True) if one.process.poll() is None else []
        for process in [one.process, *left]:
            process.kill()
        one.process.wait()


def test_a_signal_to_the_launcher_saves_once(made: Runs, start: Any) -> None:
    file = made.file("stopped", max_steps=3000, num_train_epochs=1000)
    folder = made.root / "stopped"
    one = start(accelerate_launch("ddp", "train", str(file), "output.save_steps=100000"), folder)
    one.wait_for_steps(4)
    ranks = [one.rank(0), one.rank(1)]
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(timeout=600) != 0
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left
    checkpoints = list(folder.glob("checkpoint-*"))
    assert len(checkpoints) == 1, one.text()
    assert find_latest(folder) == checkpoints[0]
    assert "Go on with --resume" in one.text()
    assert read_json(folder / "manifest.json")["status"] == "interrupted"


def test_a_killed_rank_ends_the_run_soon_and_is_named(made: Runs, start: Any) -> None:
    file = made.file("killed", max_steps=3000, num_train_epochs=1000)
    folder = made.root / "killed"
    one = start(torchrun("train", str(file), "output.save_steps=2"), folder)
    one.wait_for_steps(5)
    first, second = one.rank(0), one.rank(1)
    pid = second.pid
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    assert one.process.wait(timeout=600) != 0
    assert time.monotonic() - begun < 45
    _, left = psutil.wait_procs([first], timeout=5)
    assert not left
    assert f"process 1 of 2 (pid {pid} on" in one.text()
    latest = find_latest(folder)
    assert latest is not None
    assert int(latest.name.removeprefix("checkpoint-")) >= 2
