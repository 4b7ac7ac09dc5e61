"""Evaluation: token-mean loss and perplexity over a whole set. Holds the sums only, never logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frugal.data import TokenDataset, collate
from frugal.models.head import IGNORE_INDEX


@dataclass(frozen=True)
class EvalResult:
    """Loss is the mean over all trained tokens of the set, whatever the batch size."""

    loss: float
    perplexity: float
    tokens: int
    """Targets that the mean is over."""
    rows: int


@torch.no_grad()
def evaluate_rows(
    module: nn.Module,
    data: TokenDataset,
    *,
    batch_size: int,
    pad_id: int,
    flat: bool,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> EvalResult:
    """Token-mean loss of ``data`` with dropout off; the module's training mode is put back.

    ``module`` is a `LossModule`, or what a strategy made of one. Longest rows first, so that what does not fit shows in
    the first batch. Sums are kept in float64. Every rank takes its share of batches and calls this at the same time;
    all run equally many, since a forward pass may gather weights: what is missing is a batch without targets.
    """
    was_training = module.training
    module.eval()
    shortest = [int(data.lengths.argmin())]
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of targets
    try:
        for batch in _batches(data, batch_size, rank, world_size):
            rows = collate([data[row] for row in batch or shortest], pad_id, flat=flat)
            if not batch:
                rows["labels"] = torch.full_like(rows["labels"], IGNORE_INDEX)
            loss_sum, count = module(to_device(rows, device))
            total += torch.stack([loss_sum.double().cpu(), count.double().cpu()])
    finally:
        module.train(was_training)
    if world_size > 1:
        shared = total.to(device)
        torch.distributed.all_reduce(shared)
        total = shared.cpu()
    tokens = int(total[1])
    mean = float(total[0]) / tokens if tokens else float("nan")
    return EvalResult(mean, perplexity(mean), tokens, len(data))


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else (math.nan if math.isnan(loss) else math.inf)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move the tensors of a batch; plain numbers (max_length_q) stay."""
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


def _batches(data: TokenDataset, batch_size: int, rank: int, world_size: int) -> Iterator[list[int]]:
    order = sorted(range(len(data)), key=lambda row: (-int(data.lengths[row]), row))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches += [[] for _ in range(-len(batches) % world_size)]
    yield from batches[rank::world_size]
