"""R08: the disk fills up while saving: earlier checkpoints stay whole, the broken one goes, one clear message."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from frugal.checkpoints.complete import find_latest, why_incomplete
from frugal.checkpoints.lock import RunLock
from frugal.checkpoints.write import CheckpointParts, save_checkpoint, side_files
from frugal.config import load_config
from frugal.errors import CheckpointError
from frugal.training.log import TrainLog, read_log
from frugal.training.optim import OptimizerState


def parts(size: int) -> CheckpointParts:
    def write_adapter(folder: Path) -> None:
        save_file({"a": torch.zeros(1000)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

    state = OptimizerState({"a|exp_avg": torch.zeros(size)}, {"optimizer": "AdamW"})
    return CheckpointParts(write_adapter, state, {"0.cpu": torch.get_rng_state()}, {"config": {}})


def with_file_limit(limit: int, action: Callable[[], None]) -> int:
    """Run ``action`` in a forked process whose files cannot grow beyond ``limit`` bytes; returns its exit status.

    The kernel refuses the write (EFBIG) as it does on a full disk or an exhausted quota, also to native writers.
    """
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            action()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("limit", [2_000, 100_000])
def test_earlier_stays_and_the_broken_one_goes(tmp_path: Path, limit: int) -> None:
    """2,000: the adapter's file is too large. 100,000: the optimizer's."""
    save_checkpoint(tmp_path, 1, parts(10))

    def fails() -> None:
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path, 2, parts(100_000))
        message = str(caught.value)
        for part in (str(tmp_path / "checkpoint-2"), "bytes are free", "earlier checkpoints are whole", "too large"):
            assert part in message, message

    assert with_file_limit(limit, fails) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert find_latest(tmp_path) == tmp_path / "checkpoint-1"
    assert why_incomplete(tmp_path / "checkpoint-1") is None
    # the same at a step that has a checkpoint: it is not lost either

    def fails_again() -> None:
        with pytest.raises(CheckpointError):
            save_checkpoint(tmp_path, 1, parts(100_000))

    assert with_file_limit(limit, fails_again) == 0
    assert why_incomplete(tmp_path / "checkpoint-1") is None


def test_the_tokenizer_of_a_checkpoint_on_a_full_disk(tmp_path: Path, tiny_llama_folder: Path) -> None:
    """Its own writer reports a full disk in another way; the message and what stays are the same."""
    config = load_config({"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": str(tmp_path)}})
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    more = side_files(tokenizer, base=tiny_llama_folder, config=config)

    def with_tokenizer() -> CheckpointParts:
        made = parts(10)
        adapter = made.write_adapter

        def both(folder: Path) -> None:
            adapter(folder)
            more(folder)

        return CheckpointParts(both, made.optimizer, made.rng, made.state)

    save_checkpoint(tmp_path, 1, with_tokenizer())
    assert (tmp_path / "checkpoint-1" / "tokenizer.json").stat().st_size > 8_000

    def fails() -> None:
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path, 2, with_tokenizer())
        message = str(caught.value)
        assert "Free some space there" in message, message
        assert str(tmp_path / "checkpoint-2") in message, message

    assert with_file_limit(8_000, fails) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert why_incomplete(tmp_path / "checkpoint-1") is None


def test_the_log_on_a_full_disk_neither_ends_the_run_nor_loses_lines(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"

    def writes() -> None:
        log = TrainLog(path)
        for step in range(1, 100):
            log.write({"step": step, "loss": 0.1})
        assert "cannot write" in (log.problem or "")
        assert [record["step"] for record in read_log(path)] == list(range(1, len(read_log(path)) + 1))

    assert with_file_limit(1000, writes) == 0
    assert path.read_bytes().endswith(b"\n")
    log = TrainLog(path)
    written = len(read_log(path))
    log.write({"step": written + 1, "loss": 0.1})
    assert [record["step"] for record in read_log(path)] == list(range(1, written + 2))


def test_lines_kept_back_are_written_when_there_is_room(tmp_path: Path) -> None:
    log = TrainLog(tmp_path / "sub" / "train_log.jsonl")  # no such folder yet: cannot be written
    log.write({"step": 1})
    assert log.problem is not None
    (tmp_path / "sub").mkdir()
    log.write({"step": 2})
    assert log.problem is None
    assert [record["step"] for record in read_log(log.path)] == [1, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_stops_before_training(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"cannot write to output\.dir"), RunLock(tmp_path / "run"):
        pass
