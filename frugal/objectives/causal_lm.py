"""Next-token prediction: cross-entropy over the supervised tokens of documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from frugal.data import TokenDataset, collate
from frugal.models.head import HeadSpec, shift_labels
from frugal.objectives.base import Batch, Objective
from frugal.ops import IGNORE_INDEX


@dataclass(frozen=True)
class CausalLM(Objective):
    """A row is one document or several packed ones; a target is a supervised token, predicted by the one before it."""

    name: ClassVar[str] = "sft"

    def collate(self, data: TokenDataset, rows: Sequence[int]) -> Batch:
        """As `frugal.data.collate`: `labels` [rows, tokens] with label t at token t, -100 where nothing is trained."""
        return collate([data[row] for row in rows], self.pad_id, flat=self.flat)

    def without_targets(self, batch: Batch) -> Batch:
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}

    def targets(self, data: TokenDataset, rows: Sequence[int]) -> int:
        return int(data.num_targets[list(rows)].sum())

    def loss(self, head: HeadSpec, batch: Batch, *, training: bool, chunk_tokens: int | None) -> tuple[Tensor, Tensor]:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        labels = batch["labels"]
        count = (shift_labels(labels) != IGNORE_INDEX).sum()
        smoothing = self.label_smoothing if training else 0.0
        total = head.loss_sum(inputs, labels, chunk_tokens=chunk_tokens, label_smoothing=smoothing)
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        return total, torch.stack([total.detach().double(), count.double()])

    def of_eval_loss(self, loss: float) -> dict[str, float]:
        return {"perplexity": perplexity(loss)}

    def batch_without_values(self, rows: int, length: int, *, documents: int, device: torch.device) -> Batch:
        size = (1, rows * length) if self.flat else (rows, length)
        ids = torch.zeros(size, dtype=torch.int64, device=device)
        batch: Batch = {"input_ids": ids, "labels": torch.zeros_like(ids), "position_ids": torch.zeros_like(ids)}
        if not self.flat:
            return {**batch, "attention_mask": torch.ones_like(ids)}
        each = length // documents
        offsets = [*(r * length + d * each for r in range(rows) for d in range(documents)), rows * length]
        return {**batch, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": each, "max_length_k": each}


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a float cannot represent it."""
    return math.exp(loss) if loss < 700 else (math.nan if math.isnan(loss) else math.inf)
