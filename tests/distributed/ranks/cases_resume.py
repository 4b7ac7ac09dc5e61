"""Cases of test_resume.py: whole runs in several ranks. Each writes into a folder of its name in $RUNS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from frugal.distributed.optimizer_state import (
    load_optimizer_state,
    on_blocks,
    optimizer_state,
    part_of_state,
    whole_state,
)
from frugal.run.train import train
from frugal.training.optim8bit import AdamW8bit
from tests.distributed.ranks.resumed_runs import config, go_on_from
from tests.distributed.ranks.worker import Rank

CUT = {"shard_base": True}
EIGHT_BIT: dict[str, Any] = {"train": {"optim": "adamw_8bit"}, "lora": {"r": 64, "lora_alpha": 128}}


def place(name: str) -> Path:
    return Path(os.environ["RUNS"]) / name


def run(rank: Rank, name: str, strategy: str, since: str | None = None, step: int = 3, **sections: Any) -> None:
    """A whole run, or one that goes on from another run's checkpoint."""
    if since is not None:
        if rank.rank == 0:
            go_on_from(place(since), step, place(name))
        torch.distributed.barrier()
    train(config(place(name), rank.world, strategy, **sections), resume=True if since else None)


def case_fsdp2(rank: Rank) -> None:
    run(rank, "fsdp2", "fsdp2", distributed=CUT)


def case_fsdp2_again(rank: Rank) -> None:
    run(rank, "fsdp2-again", "fsdp2", "fsdp2", distributed=CUT)


def case_one_to_two(rank: Rank) -> None:
    run(rank, "one-to-two", "fsdp2", "one", distributed=CUT)


def case_adapters_only(rank: Rank) -> None:
    run(rank, "adapters-only", "fsdp2", "fsdp2", 6, distributed={"shard_base": False})


def case_to_ddp(rank: Rank) -> None:
    run(rank, "to-ddp", "ddp", "fsdp2")


def case_to_zero3(rank: Rank) -> None:
    run(rank, "to-zero3", "zero3", "fsdp2")


def case_two_to_four(rank: Rank) -> None:
    run(rank, "two-to-four", "fsdp2", "fsdp2", distributed=CUT)


def case_eight_bit(rank: Rank) -> None:
    run(rank, "eight-bit", "fsdp2", distributed=CUT, **EIGHT_BIT)


def case_eight_bit_again(rank: Rank) -> None:
    run(rank, "eight-bit-again", "fsdp2", "eight-bit", distributed=CUT, **EIGHT_BIT)


def case_blocks(rank: Rank) -> dict[str, Any]:
    """8-bit state of shards on and off blocks of 256: cut, gathered, and stepped on."""
    mesh = init_device_mesh("cpu", (rank.world,))
    cpu = torch.device("cpu")
    out: dict[str, Any] = {}
    rows = (("on", (128, 64), 0), ("off", (150, 65), 0), ("columns", (6, 1024), 1), ("few", (1, 8192), 0))
    for name, shape, dim in rows:
        generator = torch.Generator().manual_seed(3)
        weight, grads = torch.randn(shape, generator=generator), torch.randn((3, *shape), generator=generator)
        alone = nn.Parameter(weight.clone())
        shards = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Shard(dim)]))
        one, cut = AdamW8bit([_named(alone)], lr=1e-2), AdamW8bit([_named(shards)], lr=1e-2)
        for grad in grads[:2]:
            alone.grad = grad.clone()
            shards.grad = distribute_tensor(grad, mesh, [Shard(dim)])  # type: ignore[assignment]
            one.step()
            cut.step()
        assert isinstance(shards, DTensor)
        want = optimizer_state(one).tensors
        got = optimizer_state(cut, lambda p, state: whole_state(p, state, cpu))
        equal = all(torch.equal(want[key], got.tensors[key]) for key in want)
        shapes = {key: list(tensor.shape) for key, tensor in got.tensors.items()}
        before = {key: value.clone() for key, value in cut.state[shards].items() if isinstance(value, torch.Tensor)}
        load_optimizer_state(cut, got, "state", part_of_state)
        after = cut.state[shards]
        kept = all(torch.equal(before[key], after[key]) for key in before)
        cut.step()
        out[name] = {
            "on_blocks": on_blocks(shards),
            "equal": equal,
            "kept": kept,
            "shapes_equal": shapes == {key: list(tensor.shape) for key, tensor in want.items()},
            "step": after["step"],
            "far": float((shards.full_tensor() - alone).abs().max()),
        }
    return out


def _named(parameter: nn.Parameter) -> dict[str, Any]:
    return {"params": [parameter], "names": ["w"]}
