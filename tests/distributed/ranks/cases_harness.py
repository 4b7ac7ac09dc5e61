"""Cases of test_harness.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.ranks.worker import Rank


def case_sum(rank: Rank) -> dict[str, Any]:
    value = torch.tensor([float(rank.rank + 1)])
    torch.distributed.all_reduce(value)
    rank.save({"value": value})
    return {"rank": rank.rank, "world": rank.world, "sum": float(value)}


def case_one_raises(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("this rank has had enough")
    torch.distributed.barrier()


def case_one_leaves(rank: Rank) -> None:
    if rank.rank == 0:
        import os

        os._exit(3)
    torch.distributed.barrier()
