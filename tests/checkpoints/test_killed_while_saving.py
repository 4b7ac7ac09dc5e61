"""R07: a process killed during a save leaves half a checkpoint; resume must take the newest complete one."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from frugal.checkpoints.complete import find_latest
from frugal.checkpoints.read import load_checkpoint
from frugal.checkpoints.rotation import rotate
from frugal.checkpoints.write import CheckpointParts, recover, save_checkpoint
from frugal.training.optim import OptimizerState


def parts(step: int) -> CheckpointParts:
    def write_adapter(folder: Path) -> None:
        save_file({"a": torch.full((50_000,), float(step))}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

    state = OptimizerState({"a|exp_avg": torch.full((50_000,), float(step))}, {"optimizer": "AdamW"})
    return CheckpointParts(write_adapter, state, {"0.cpu": torch.get_rng_state()}, {"config": {}})


def forked(action: Callable[[], None]) -> int:
    """Run ``action`` in a forked process; returns its id."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return pid


def check(run_dir: Path, at_least: int) -> int:
    """The newest complete checkpoint after a kill: whole, and none older than what was finished before."""
    recover(run_dir, lambda text: None)
    latest = find_latest(run_dir, lambda text: None)
    assert latest is not None
    loaded = load_checkpoint(latest)
    assert loaded.step >= at_least
    assert torch.equal(loaded.optimizer.tensors["a|exp_avg"], torch.full((50_000,), float(loaded.step)))
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]
    return loaded.step


def test_killed_before_each_file_operation_of_a_save(tmp_path: Path) -> None:
    """Every open, rename, mkdir and removal of a save, and of a save at a step that has one already."""
    for target in (2, 1):
        for count in range(1, 200):
            run_dir = tmp_path / f"{target}-{count}"
            save_checkpoint(run_dir, 1, parts(1))

            def killed(count: int = count, run_dir: Path = run_dir, target: int = target) -> None:
                seen = 0

                def hook(event: str, args: tuple[object, ...]) -> None:
                    nonlocal seen
                    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                        seen += 1
                        if seen == count:
                            os.kill(os.getpid(), signal.SIGKILL)

                sys.addaudithook(hook)
                save_checkpoint(run_dir, target, parts(target))

            _, status = os.waitpid(forked(killed), 0)
            check(run_dir, 1)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
        else:
            raise AssertionError("the save never finished")
        assert count > 15  # every file and rename was a point of death


def test_killed_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(7)
    newest = 0
    begun = time.perf_counter()
    save_checkpoint(tmp_path, newest, parts(newest))
    one_save = time.perf_counter() - begun
    for _ in range(25):
        begin = newest

        def saves(begin: int = begin) -> None:
            for step in range(begin + 1, begin + 1000):
                save_checkpoint(tmp_path, step, parts(step))
                rotate(tmp_path, limit=2, best_step=None, ours=lambda folder: True)

        pid = forked(saves)
        time.sleep(chance.uniform(0.0, 8 * one_save))
        os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGTERM]))
        os.waitpid(pid, 0)
        newest = check(tmp_path, begin)
    assert newest > 0
