"""Cases of tests/distributed/test_plan_ranks_live.py: what a rank's tensors take at most in a step."""

from __future__ import annotations

from typing import Any

import torch

from frugal.distributed.fsdp2 import FullyShard
from frugal.distributed.strategy import DataParallel, Strategy
from frugal.memory.meter import LiveBytesMeter
from frugal.training.loop import one_step
from frugal.training.schedule import split_step
from frugal.training.setup import LoopState
from tests.distributed.ranks.sharded_runs import Running, Setting, start
from tests.distributed.ranks.worker import Rank

CPU = torch.device("cpu")


def settings() -> dict[str, dict[str, Any]]:
    """Name -> strategy, policy, micro-batch and micro-batches of a step on each of two ranks."""
    return {
        "fsdp2": {"strategy": "fsdp2", "base": True, "policy": "recompute", "micro": 4, "accumulate": 1},
        "fsdp2_none": {"strategy": "fsdp2", "base": True, "policy": "none", "micro": 4, "accumulate": 1},
        "fsdp2_window": {"strategy": "fsdp2", "base": True, "policy": "recompute", "micro": 2, "accumulate": 2},
        "adapters": {"strategy": "fsdp2", "base": False, "policy": "recompute", "micro": 4, "accumulate": 1},
        "ddp": {"strategy": "ddp", "base": False, "policy": "recompute", "micro": 4, "accumulate": 1},
    }


def strategy_of(values: dict[str, Any]) -> Strategy:
    return DataParallel(CPU) if values["strategy"] == "ddp" else FullyShard(CPU, shard_base=values["base"])


def case_peaks(rank: Rank) -> dict[str, Any]:
    found = {}
    for name, values in settings().items():
        setting = Setting(policy=values["policy"], micro=values["micro"], steps=4, folder="TINY_WIDE")
        running = start(setting, strategy_of(values))
        found[name] = measured(rank, running, values)
        running.handle.close()
    return found


def measured(rank: Rank, running: Running, values: dict[str, Any]) -> dict[str, Any]:
    """Peaks of a first and a later step, and the micro-batch that made them."""
    job = running.job
    step = job.optimizer_step(loss_scaling=False)
    job.wrapped.train()
    out: dict[str, Any] = {}
    state = LoopState()
    for phase in ("first_step", "steady_step"):
        with LiveBytesMeter(job.module, job.optimizer) as meter:
            one_step(job, step, state)
        mine = split_step(
            job.order.rows_of(state.step - 1), micro=values["micro"], rank=rank.rank, world_size=rank.world
        )
        longest = max(mine, key=lambda micro: int(job.rows.lengths[micro].sum()))
        out[phase] = {
            "peak": meter.peak_bytes,
            "start": meter.report().start_bytes,
            "tokens": int(job.rows.lengths[longest].sum()),
            "targets": int(job.rows.num_targets[longest].sum()),
        }
    return out
