"""The interface of a training objective: all that loop, evaluation, warm-up step and planner know of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from frugal.data import TokenDataset
from frugal.models.head import HeadSpec

Batch = dict[str, Any]
"""Tensors and plain numbers: the model's keywords, and what the loss needs besides."""


@dataclass(frozen=True)
class Objective(ABC):
    """Rows to batches, batches to a sum of losses, sums to metrics.

    A row is what `collate` takes from a data set by its number: one document, several packed ones, or for objectives
    over pairs several sequences. The loss of an optimizer step is the sum over all its micro-batches and ranks divided
    by the number of their targets; an objective sums and never divides.
    """

    name: ClassVar[str]
    """Its row in `frugal.objectives.registry`."""
    pad_id: int = 0
    """Written behind short rows; never a target."""
    flat: bool = False
    """Join the rows of a micro-batch instead of padding them; needs an attention that reads cu_seq_lens."""
    label_smoothing: float = 0.0
    """In training; evaluation stays plain, so that runs can be compared."""
    answers: ClassVar[int] = 1
    """Documents of up to data.max_length tokens in a row: 2 where a row is a pair."""
    uses_reference: ClassVar[bool] = False
    """Whether a step runs the base without its adapter too."""
    two_passes: ClassVar[bool] = False
    """Whether the loss takes a figure of the whole step, of all its micro-batches and ranks: `first_pass` then."""

    @abstractmethod
    def collate(self, data: TokenDataset, rows: Sequence[int]) -> Batch:
        """One micro-batch of these rows."""

    @abstractmethod
    def without_targets(self, batch: Batch) -> Batch:
        """The same batch with nothing to train: its loss is exactly 0, and so are its gradients."""

    @abstractmethod
    def targets(self, data: TokenDataset, rows: Sequence[int]) -> int:
        """How many targets these rows hold: what the step's sum of losses is divided by."""

    @abstractmethod
    def loss(self, head: HeadSpec, batch: Batch, *, training: bool, chunk_tokens: int | None) -> tuple[Tensor, Tensor]:
        """The differentiable sum of losses (fp32 scalar), and sums that add up (detached, float64 [2 or more]).

        Sums begin with the loss and the number of targets; what follows is the objective's own, for `metrics`.
        ``chunk_tokens``: tokens whose logits exist at a time; None: by size.
        """

    def first_pass(self, batch: Batch) -> Batch:
        """What `loss` gives, without gradients, the sums of which are the step's figure for `second_pass`."""
        raise NotImplementedError(f"{self.name} is one pass")

    def second_pass(self, batch: Batch, sums: Tensor) -> Batch:
        """``batch`` with the step's figure; a batch without takes its own."""
        raise NotImplementedError(f"{self.name} is one pass")

    def metrics(self, sums: Sequence[float], *, training: bool) -> dict[str, float]:
        """Means from `loss`'s sums over all micro-batches and ranks: `loss`, and by name whatever else is reported."""
        mean = sums[0] / sums[1] if sums[1] else float("nan")
        return {"loss": mean} if training else {"loss": mean, **self.of_eval_loss(mean)}

    def of_eval_loss(self, loss: float) -> dict[str, float]:
        """Other ways to tell a mean evaluation loss, by name."""
        return {}

    @abstractmethod
    def batch_without_values(self, rows: int, length: int, *, documents: int, device: torch.device) -> Batch:
        """A batch of ``rows`` rows of ``length`` tokens for the planner: `collate`'s shapes, every token a target.

        ``documents``: packed in each row, equally long; a pair is one row.
        """
