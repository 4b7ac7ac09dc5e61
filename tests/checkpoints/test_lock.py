"""The lock on a run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from frugal.checkpoints.lock import LOCK_NAME, RunLock
from frugal.errors import CheckpointError


def test_second_holder_is_refused_and_the_first_left_alone(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run") as first:
        before = first.path.read_bytes()
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"), RunLock(tmp_path / "run"):
            pass
        assert first.path.read_bytes() == before
        first.alive()
    assert not (tmp_path / "run" / LOCK_NAME).exists()


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass


def _write(folder: Path, **entries: object) -> None:
    (folder / LOCK_NAME).write_text(json.dumps(entries))


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with RunLock(tmp_path / "mine" / "a" / "run"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with RunLock(tmp_path / "mine" / "a" / "run"):
        (tmp_path / "mine" / "a" / "run" / "config.yaml").touch()
    assert (tmp_path / "mine" / "a" / "run" / "config.yaml").exists()


def test_lock_of_a_dead_process_is_stale(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    _write(tmp_path, pid=dead.pid, process_started=0.0, host=os.uname().nodename, token="x")
    said: list[str] = []
    with RunLock(tmp_path, said.append):
        assert said == [f"removed a stale lock: process {dead.pid} on {os.uname().nodename} is gone"]


def test_number_given_to_another_process_is_stale(tmp_path: Path) -> None:
    started = psutil.Process().create_time()
    _write(tmp_path, pid=os.getpid(), process_started=started - 500, host=os.uname().nodename, token="x")
    with RunLock(tmp_path, lambda text: None):
        pass


def test_another_machine_is_trusted_until_it_is_silent(tmp_path: Path) -> None:
    _write(tmp_path, pid=1, process_started=0.0, host="elsewhere", token="x")
    with pytest.raises(CheckpointError, match="process 1 on elsewhere"), RunLock(tmp_path):
        pass
    os.utime(tmp_path / LOCK_NAME, (0, 0))
    with RunLock(tmp_path, lambda text: None):
        pass


def test_a_run_whose_lock_was_taken_notices(tmp_path: Path) -> None:
    with RunLock(tmp_path) as mine:
        _write(tmp_path, pid=1, process_started=0.0, host="elsewhere", token="theirs")
        with pytest.raises(CheckpointError, match="taken over"):
            mine.alive()
    assert (tmp_path / LOCK_NAME).exists()  # not ours to remove


def test_a_folder_that_cannot_be_made_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write to output\.dir .*Not a directory"):
        RunLock(tmp_path / "file" / "run").__enter__()
