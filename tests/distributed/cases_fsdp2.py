"""Cases of test_fsdp2.py."""

from __future__ import annotations

from typing import Any

import torch
from sharded_runs import Setting, start
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from worker import Rank

from frugal.shard.fsdp import FullyShard
from frugal.shard.tensors import local_bytes

CPU = torch.device("cpu")


def case_same_result(rank: Rank) -> dict[str, Any]:
    running = start(Setting(), FullyShard(CPU))
    running.train()
    found = running.adapter()
    if rank.rank == 0:
        rank.save(found)
    return {"records": running.records}
