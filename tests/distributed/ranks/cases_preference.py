"""Cases of tests/distributed/test_preference.py: objectives over answers under data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from frugal.objectives.pairs import precompute_reference
from frugal.training.evaluate import evaluate_rows
from frugal.training.optim import trainable
from tests.distributed.ranks.worker import Rank
from tests.support import preference

NAMES = ("dpo", "orpo", "simpo", "kto")


def trained(folder: Path, name: str, rows_of_a_rank: int) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """(record of each step, metrics of evaluation, trained tensors); 5 pairs by 4, so that a rank has none at times.

    In float64: what differs by the order of sums stays far below what a fault would change.
    """
    more: list[dict[str, Any]] = [*preference.PAIRS, {"prompt": "x y", "chosen": " z", "rejected": " w w"}]
    if name == "kto":
        more = [*preference.JUDGED, {"prompt": "x y", "completion": " z", "label": True}]
    data = preference.pairs(folder, more, name)
    made = preference.job(
        preference.lora_llama().double(), data, {"name": name}, per_device_train_batch_size=rows_of_a_rank,
        gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3,
    )  # fmt: skip
    rank, world = (
        (torch.distributed.get_rank(), torch.distributed.get_world_size())
        if torch.distributed.is_initialized()
        else (0, 1)
    )
    if name == "kto":  # with the reference computed beforehand, each rank a part
        precompute_reference(
            made.module.head, data, made.module.objective, batch_documents=3, chunk_tokens=None,
            device=torch.device("cpu"), rank=rank, world_size=world,
        )  # fmt: skip
    records = preference.steps(made)
    shown = evaluate_rows(
        made.module, data, made.module.objective, batch_size=1, device=torch.device("cpu"), rank=rank, world_size=world
    )
    return records, shown.metrics, trainable(made.module.model)


def case_pairs(rank: Rank) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        place = rank.folder / f"{name}{rank.rank}"
        place.mkdir()
        records, shown, tensors = trained(place, name, 1)
        rank.save(tensors, name)
        found[name] = {"records": records, "eval": shown}
    return found
