"""Cases of test_saved_whole.py: whole runs with a saved module, sharded, each in a folder of its name in $RUNS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from frugal.run.train import train
from tests.distributed.ranks.resumed_runs import config
from tests.distributed.ranks.worker import Rank

SECTIONS: dict[str, Any] = {"lora": {"modules_to_save": ["lm_head"]}, "train": {"max_steps": 3, "eval_steps": 3}}


def case_fsdp2(rank: Rank) -> None:
    train(config(Path(os.environ["RUNS"]) / "fsdp2", rank.world, "fsdp2", distributed={"shard_base": True}, **SECTIONS))


def case_zero3(rank: Rank) -> None:
    train(config(Path(os.environ["RUNS"]) / "zero3", rank.world, "zero3", **SECTIONS))
