"""Evaluation: an objective's metrics over a whole set. Holds sums only, never logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frugal.data import TokenDataset
from frugal.distributed.device_wait import numbers
from frugal.objectives import Objective
from frugal.ops.host_values import to_device as moved


@dataclass(frozen=True)
class EvalResult:
    """Metrics over all targets of a set, whatever the batch size."""

    metrics: dict[str, float]
    """`loss`, and what else the objective reports."""
    tokens: int
    """Targets that the means are over."""
    rows: int

    @property
    def loss(self) -> float:
        """Mean loss of a target."""
        return self.metrics["loss"]


@torch.no_grad()
def evaluate_rows(
    module: nn.Module,
    data: TokenDataset,
    objective: Objective,
    *,
    batch_size: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> EvalResult:
    """Metrics of ``data`` with dropout off; the module's training mode is put back.

    ``module`` is a `LossModule` of ``objective``, or what a strategy made of one. Longest rows first, so that what does
    not fit shows in the first batch. Sums are kept in float64. Every rank takes its share of batches and calls this at
    the same time; all run equally many, since a forward pass may gather weights: what is missing is a batch without
    targets.
    """
    was_training = module.training
    module.eval()
    shortest = [int(data.lengths.argmin())]
    totals: Tensor | None = None
    try:

        def batches() -> Iterator[dict[str, Any]]:
            for rows in _batches(data, batch_size, rank, world_size):
                batch = objective.collate(data, rows or shortest)
                yield to_device(batch if rows else objective.without_targets(batch), device)

        figure = first_pass(module, objective, batches(), world_size) if objective.two_passes else None
        for batch in batches():
            _, sums = module(batch if figure is None else objective.second_pass(batch, figure))
            totals = sums if totals is None else totals + sums
    finally:
        module.train(was_training)
    assert totals is not None
    if world_size > 1:
        torch.distributed.all_reduce(totals)
    found = numbers(totals)
    return EvalResult(objective.metrics(found, training=False), int(found[1]), len(data))


@torch.no_grad()
def first_pass(module: nn.Module, objective: Objective, batches: Iterable[dict[str, Any]], world_size: int) -> Tensor:
    """Sums over all batches and ranks that an objective of two passes needs before its loss; dropout is off."""
    was_training = module.training
    module.eval()
    try:
        sums = [module(objective.first_pass(batch))[1] for batch in batches]
    finally:
        module.train(was_training)
    total = torch.stack(sums).sum(dim=0)
    if world_size > 1:
        torch.distributed.all_reduce(total)
    return total


def longest_first(lengths: np.ndarray) -> list[int]:
    """Row ids as evaluation takes them."""
    return sorted(range(len(lengths)), key=lambda row: (-int(lengths[row]), row))


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors of a batch, whose values the host goes on knowing; plain numbers (max_length_q) stay."""
    return {key: moved(value, device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def _batches(data: TokenDataset, batch_size: int, rank: int, world_size: int) -> Iterator[list[int]]:
    order = longest_first(data.lengths)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches += [[] for _ in range(-len(batches) % world_size)]
    yield from batches[rank::world_size]
