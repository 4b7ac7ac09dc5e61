"""A rank that fails ends the others in seconds, also while the device waits for it and never answers (B5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import typer

from frugal.cli.options import handled
from frugal.distributed import device_wait, group
from frugal.errors import Interrupted, ProcessLost
from frugal.training.signals import StopAtOnce


class Stuck:
    """An event behind an operation that waits for a process that is gone."""

    def query(self) -> bool:
        return False


class Store:
    """What the ranks write to one another."""

    def __init__(self, **content: str) -> None:
        self.content = {key.replace("_", "/"): value.encode() for key, value in content.items()}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.content for key in keys)

    def get(self, key: str) -> bytes:
        return self.content[key]

    def set(self, key: str, value: str) -> None:
        self.content[key] = value.encode()


class World:
    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def put_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``put_host(pids, store)``: this process is rank 0 of as many as there are pids, connected by NCCL."""
    world = World()

    def put(pids: list[int], store: Store) -> World:
        processes = [group._Process("here", pid, 1) for pid in pids]
        host = group._Host(world, None, store, processes)  # type: ignore[arg-type]
        monkeypatch.setattr(group, "_host", [host])
        return world

    monkeypatch.setattr(group, "_together", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *a: 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *a: "nccl")
    yield put
    group._host.clear()


def lost_within(seconds: float, put_host: Any, pids: list[int], store: Store) -> str:
    world = put_host(pids, store)
    begun = time.monotonic()
    with pytest.raises(ProcessLost) as caught:
        device_wait.wait(Stuck())
    assert time.monotonic() - begun < seconds
    assert world.aborted == 1, "what waits for the lost process is given up"
    return str(caught.value)


def test_a_killed_rank_is_named(put_host: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    text = lost_within(2, put_host, [os.getpid(), os.getpid(), ended.pid], Store())
    assert "process 2 of 3" in text
    assert "has ended" in text
    assert "--resume" in text


def test_a_rank_that_stopped_with_an_error_is_quoted(put_host: Any) -> None:
    """Out of memory on one rank, or a file that only one lacks: its process may live on."""
    text = lost_within(2, put_host, [os.getpid()] * 2, Store(stopped_1="MemoryBudgetError: the run does not fit"))
    assert "process 1 of 2" in text
    assert "has stopped: MemoryBudgetError: the run does not fit" in text


def test_a_slow_rank_is_waited_for(put_host: Any) -> None:
    class Late:
        reached = time.monotonic() + 1.2

        def query(self) -> bool:
            return time.monotonic() > self.reached

    world = put_host([os.getpid()] * 2, Store())
    device_wait.wait(Late())
    assert world.aborted == 0


def test_signals_arrive_while_the_device_is_waited_for(put_host: Any) -> None:
    """A handler runs between two instructions of Python's, which a read inside the driver does not reach."""
    put_host([os.getpid()] * 2, Store())

    def terminated() -> None:
        with StopAtOnce(lambda: "in a step"):
            sender = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
            sender.start()
            device_wait.wait(Stuck())

    with pytest.raises(Interrupted, match="SIGTERM"):
        terminated()


def test_numbers_of_one_process() -> None:
    assert device_wait.numbers(torch.tensor([[1.0, 2.0]], dtype=torch.float64)) == [1.0, 2.0]
    assert device_wait.number(torch.tensor(3.5)) == 3.5


def test_the_interpreter_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)

    @handled
    def command() -> None:
        raise ProcessLost("process 1 of 2 has ended")

    for used_a_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=used_a_gpu: used)
        with pytest.raises(typer.Exit):
            command()
        assert left == [75] * used_a_gpu
