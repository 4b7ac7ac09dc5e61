"""B02 (and B01's second start): a training cell run again and again, also after a failure, leaves nothing behind."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import frugal.run.train
from frugal.errors import MemoryBudgetError
from frugal.training.setup import TrainSetup
from tests.support import runs


class Broken(Exception):
    """What a user's interrupted cell raises."""


def test_five_runs_one_of_them_failing(
    tmp_path: Path, tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs: list[tuple[str, weakref.ref[Any]]] = []
    fail_at: list[int] = []
    failure: list[Exception] = []
    original = frugal.run.train.train_loop

    def watched(job: TrainSetup, hooks: Any, state: Any) -> Any:
        things = {"module": job.module, "model": job.module.model, "optimizer": job.optimizer, "rows": job.order}
        refs.extend((name, weakref.ref(thing)) for name, thing in things.items())
        refs.extend((name, weakref.ref(p)) for name, p in job.module.named_parameters())
        record = hooks.record

        def failing(entry: dict[str, Any]) -> None:
            record(entry)
            if fail_at and entry["step"] == fail_at[0]:
                raise failure[0]

        hooks.record = failing
        return original(job, hooks, state)

    monkeypatch.setattr("frugal.run.train.train_loop", watched)
    data = runs.write_rows(tmp_path / "rows.jsonl")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = None
    memory: list[int] = []
    kept: list[BaseException] = []
    for attempt in range(5):
        config = runs.config(tiny_llama_folder, data, tmp_path / f"run-{attempt}")
        config["train"]["max_steps"] = 4
        if attempt == 2:
            fail_at.append(2)
            failure[:] = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")]
            with pytest.raises(MemoryBudgetError, match="out of device memory") as caught:
                frugal.run.train.train(config)
            kept.append(caught.value)  # as sys.last_value and sys.last_traceback do
            assert caught.value.__traceback__ is not None
            fail_at.clear()
        elif attempt == 3:
            fail_at.append(2)
            failure[:] = [Broken()]
            with pytest.raises(Broken) as broken:
                frugal.run.train.train(config)
            names = [set(frame.frame.f_locals) for frame in broken.traceback[1:]]
            assert any({"module", "optimizer"} <= found for found in names), "a debugger finds the run's variables"
            failure.clear()
            fail_at.clear()
            del broken, names
        else:
            frugal.run.train.train(config)
        gc.collect()
        assert [name for name, ref in refs if ref() is not None] == [], attempt
        assert len(refs) > 20 * (attempt + 1)
        assert {number: signal.getsignal(number) for number in handlers} == handlers
        if attempt == 0:
            threads = set(threading.enumerate())
        assert set(threading.enumerate()) == threads
        memory.append(psutil.Process().memory_info().rss)
    assert memory[4] <= memory[0] * 1.05
    assert kept

    # the failed run's folder says what happened, its lock is gone, and it can go on
    run = tmp_path / "run-2"
    assert not (run / "run.lock").exists()
    assert '"status": "failed"' in (run / "manifest.json").read_text()
