"""The lock on a run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frugal.checkpoints.lock import LOCK_NAME, RunLock
from frugal.errors import CheckpointError

HOLDS = """
import sys, time
from pathlib import Path
from frugal.checkpoints.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_second_holder_is_refused_and_the_first_left_alone(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run") as first:
        before = first.path.read_bytes()
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"), RunLock(tmp_path / "run"):
            pass
        assert first.path.read_bytes() == before
    assert not (tmp_path / "run" / LOCK_NAME).exists()


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with RunLock(tmp_path / "mine" / "a" / "run"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with RunLock(tmp_path / "mine" / "a" / "run"):
        (tmp_path / "mine" / "a" / "run" / "config.yaml").touch()
    assert (tmp_path / "mine" / "a" / "run" / "config.yaml").exists()


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"in use by process {other.pid}"), RunLock(tmp_path):
            pass
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == other.pid
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    said: list[str] = []
    with RunLock(tmp_path, said.append):
        assert said[0].startswith(f"removed a stale lock: process {other.pid} on {os.uname().nodename} is gone")
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "[]", '{"pid": 1, "process_started": 0.0, "host": "elsewhere", "token": "x"}'])
def test_what_a_killed_run_left_is_taken_over(tmp_path: Path, content: str) -> None:
    """An empty file (a power failure), another thing, the file of an earlier version: nobody has the kernel's lock."""
    (tmp_path / LOCK_NAME).write_text(content)
    said: list[str] = []
    with RunLock(tmp_path, said.append):
        assert ("process 1 on elsewhere" if "pid" in content else "an unknown process") in said[0]


def test_a_folder_that_cannot_be_made_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write to output\.dir .*Not a directory"):
        RunLock(tmp_path / "file" / "run").__enter__()
