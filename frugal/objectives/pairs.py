"""What objectives over pairs share: a chosen and a rejected answer as two documents, and their log-probabilities.

A row is a pair, and a pair is the unit of the loss: a step's losses are divided by its number of pairs. The names of
the metrics are TRL's. No logits exist: each token's log-probability comes from the fused head.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from frugal.data import TokenDataset, TokenRow, collate
from frugal.errors import UnsupportedError
from frugal.models.head import HeadSpec, shift_labels
from frugal.objectives.base import Batch, Objective
from frugal.objectives.causal_lm import CausalLM
from frugal.ops import IGNORE_INDEX

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class Answers(NamedTuple):
    """A number for each pair's chosen and rejected answer, [pairs]."""

    chosen: Tensor
    rejected: Tensor


@dataclass(frozen=True)
class Pairs(Objective):
    """A row is a pair; the loss is a function of the answers' log-probabilities, summed over the answer's tokens."""

    answers: ClassVar[int] = 2
    beta: float = 0.1
    precompute_reference: bool = False

    @abstractmethod
    def of_pairs(
        self, policy: Answers, reference: Answers | None, tokens: Answers, *, training: bool
    ) -> tuple[Tensor, Answers]:
        """Each pair's loss [pairs], and the rewards that are reported.

        ``policy``, ``reference``: sums of log-probabilities; the latter where `uses_reference`. ``tokens``: of each
        answer. Evaluation is without label smoothing.
        """

    def collate(self, data: TokenDataset, rows: Sequence[int]) -> Batch:
        """As `frugal.data.collate` over chosen, rejected, chosen, ...; `sizes` are the tokens of each as the batch has
        them, `weights` [pairs] is 0 for a pair that counts for nothing."""
        batch = sized([one for row in rows for one in documents_of(data[row])], self.pad_id, flat=self.flat)
        if data.reference is not None:
            batch["reference"] = torch.from_numpy(data.reference[_documents_in(data, rows)])
        return {**batch, "weights": torch.ones(len(rows))}

    def without_targets(self, batch: Batch) -> Batch:
        labels = torch.full_like(batch["labels"], IGNORE_INDEX)
        return {**batch, "labels": labels, "weights": torch.zeros_like(batch["weights"])}

    def targets(self, data: TokenDataset, rows: Sequence[int]) -> int:
        return len(rows)

    def loss(self, head: HeadSpec, batch: Batch, *, training: bool, chunk_tokens: int | None) -> tuple[Tensor, Tensor]:
        batch = dict(batch)
        weights = batch.pop("weights").double()
        tokens = _in_pairs(by_document((shift_labels(batch["labels"]) != IGNORE_INDEX).flatten(), batch["sizes"]))
        reference = None
        if self.uses_reference:  # first: nothing of the step is kept yet
            reference = _in_pairs(by_base(head, batch, chunk_tokens))
        policy = _in_pairs(log_probs(head, batch, chunk_tokens))
        losses, rewards = self.of_pairs(policy, reference, tokens, training=training)
        total = (losses * weights).sum()
        margins = rewards.chosen - rewards.rejected
        shown = [losses, torch.ones_like(weights), *rewards, margins, (margins > 0).double(), *policy]
        sums = torch.stack([(one.detach().double() * weights).sum() for one in shown])
        return total.float(), sums

    def metrics(self, sums: Sequence[float], *, training: bool) -> dict[str, float]:
        count = sums[1] or float("nan")
        return {"loss": sums[0] / count, **{name: one / count for name, one in zip(METRICS, sums[2:], strict=True)}}

    def batch_without_values(self, rows: int, length: int, *, documents: int, device: torch.device) -> Batch:
        each = max(1, length // 2)
        tokens = CausalLM(flat=self.flat)
        batch = (
            tokens.batch_without_values(rows, 2 * each, documents=2, device=device)
            if self.flat
            else tokens.batch_without_values(2 * rows, each, documents=1, device=device)
        )
        if self.precompute_reference:
            batch["reference"] = torch.zeros(2 * rows, dtype=torch.float64, device=device)
        return {**batch, "sizes": [each] * (2 * rows), "weights": torch.ones(rows, device=device)}


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base as it was: no adapter, no dropout, no gradients."""
    off: Any = getattr(model, "disable_adapter", None)
    if off is None:
        raise UnsupportedError(
            "this objective compares with the base without its adapter, and the model has none: train with an adapter"
        )
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), off():
            yield
    finally:
        model.train(training)


def documents_of(row: TokenRow) -> Iterator[TokenRow]:
    """Each document of a row as a row of its own."""
    starts = row.doc_starts.tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        limits = np.array([0, end - begin], np.int32)
        yield TokenRow(row.input_ids[begin:end], row.trained[begin:end], limits, row.origin[number : number + 1])


def sized(documents: Sequence[TokenRow], pad_id: int, *, flat: bool) -> Batch:
    """As `frugal.data.collate` over documents, with their `sizes` in the batch."""
    batch = collate(documents, pad_id, flat=flat)
    width = batch["labels"].shape[-1]
    return {**batch, "sizes": [len(one.input_ids) if flat else width for one in documents]}


def log_probs(head: HeadSpec, batch: Batch, chunk_tokens: int | None) -> Tensor:
    """Sum of the log-probabilities of each document's targets, float64 [documents], of what `sized` gives."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "sizes", "reference")}
    return by_document(head.log_probs(inputs, batch["labels"], chunk_tokens=chunk_tokens), batch["sizes"])


def by_base(head: HeadSpec, batch: Batch, chunk_tokens: int | None) -> Tensor:
    """`log_probs` of the base without its adapter: the batch's `reference` where it has one."""
    if "reference" in batch:
        known: Tensor = batch["reference"]
        return known
    with without_adapter(head.model):
        return log_probs(head, batch, chunk_tokens)


def precompute_reference(
    head: HeadSpec,
    data: TokenDataset,
    objective: Objective,
    *,
    batch_documents: int,
    chunk_tokens: int | None,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Fill `data.reference`, longest documents first; every rank does its share of the batches."""
    order = np.argsort(-data.document_lengths, kind="stable")
    found = torch.zeros(len(order), dtype=torch.float64)
    for at in range(rank * batch_documents, len(order), world_size * batch_documents):
        numbers = order[at : at + batch_documents]
        documents = [_document(data, int(number)) for number in numbers]
        batch = sized(documents, objective.pad_id, flat=objective.flat)
        moved = {key: one.to(device) if isinstance(one, Tensor) else one for key, one in batch.items()}
        found[torch.from_numpy(numbers)] = by_base(head, moved, chunk_tokens).cpu()
    if world_size > 1:
        on_device = found.to(device)
        torch.distributed.all_reduce(on_device)
        found = on_device.cpu()
    data.reference = found.numpy()


def _document(data: TokenDataset, number: int) -> TokenRow:
    begin, end = int(data.doc_starts[number]), int(data.doc_starts[number + 1])
    limits = np.array([0, end - begin], np.int32)
    ids, trained = np.array(data.input_ids[begin:end]), np.array(data.trained[begin:end])
    return TokenRow(ids, trained, limits, data.origins[number : number + 1])


def _documents_in(data: TokenDataset, rows: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.arange(data.row_docs[row], data.row_docs[row + 1]) for row in rows])


def by_document(values: Tensor, sizes: list[int]) -> Tensor:
    """Sums of ``values`` [tokens] over each document, in float64: a difference of sums of hundreds is what counts.

    Not by index_add, whose order on a GPU differs from run to run.
    """
    return torch.stack([part.sum(dtype=torch.float64) for part in values.split(sizes)])


def _in_pairs(sums: Tensor) -> Answers:
    return Answers(sums[0::2], sums[1::2])
