"""Kahneman-Tversky optimisation: good answers up and bad ones down, from single answers with a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from frugal.data import TokenDataset
from frugal.models.head import HeadSpec
from frugal.objectives.base import Batch, Objective
from frugal.objectives.causal_lm import CausalLM
from frugal.objectives.pairs import by_base, documents_of, log_probs, sized
from frugal.ops import IGNORE_INDEX

_OTHER = "other_"
"""Before the keys of the second documents in a batch: prompts with the answers of other rows."""


@dataclass(frozen=True)
class KTO(Objective):
    """KTO (arXiv 2402.01306, eq. 8): the sigmoid of how far an answer moved from the base, against how far answers that
    do not belong to their prompts moved (the KL term, not below 0).

    That term is one number of the whole step. It stands inside the sigmoid, so it has to be known before the first
    backward pass: `first_pass`. TRL takes a micro-batch's own, which changes with its size.
    """

    name: ClassVar[str] = "kto"
    answers: ClassVar[int] = 2
    uses_reference: ClassVar[bool] = True
    two_passes: ClassVar[bool] = True
    beta: float = 0.1
    precompute_reference: bool = False
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def collate(self, data: TokenDataset, rows: Sequence[int]) -> Batch:
        """Own documents as `frugal.objectives.pairs.sized`, the second ones beside; `good`, `weights` [rows]."""
        own, other = zip(*(documents_of(data[row]) for row in rows), strict=True)
        one, two = sized(own, self.pad_id, flat=self.flat), sized(other, self.pad_id, flat=self.flat)
        if data.reference is not None:
            first = torch.as_tensor(data.row_docs[list(rows)])
            reference = torch.from_numpy(data.reference)
            one["reference"], two["reference"] = reference[first], reference[first + 1]
        good = torch.tensor([bool(data.good[data.row_docs[row]]) for row in rows])
        return {
            **one,
            **_named(two),
            "good": good,
            "weights": torch.ones(len(rows)),
        }

    def without_targets(self, batch: Batch) -> Batch:
        nothing = {key: torch.full_like(batch[key], IGNORE_INDEX) for key in ("labels", f"{_OTHER}labels")}
        return {**batch, **nothing, "weights": torch.zeros_like(batch["weights"])}

    def targets(self, data: TokenDataset, rows: Sequence[int]) -> int:
        return len(rows)

    def first_pass(self, batch: Batch) -> Batch:
        return {**{key: value for key, value in batch.items() if key.startswith(_OTHER)}, "weights": batch["weights"]}

    def second_pass(self, batch: Batch, sums: Tensor) -> Batch:
        return {**{key: value for key, value in batch.items() if not key.startswith(_OTHER)}, "kl": _mean(sums)}

    def loss(self, head: HeadSpec, batch: Batch, *, training: bool, chunk_tokens: int | None) -> tuple[Tensor, Tensor]:
        own = {key: value for key, value in batch.items() if not key.startswith(_OTHER)}
        weights = own.pop("weights").double()
        kl: Tensor | None = own.pop("kl", None)
        if kl is None:
            moved = self._moved_others(head, batch, chunk_tokens)
            sums = torch.stack([(moved * weights).sum(), weights.sum()])
            if "labels" not in own:
                return sums[0].float(), sums
            kl = _mean(sums)
        good = own.pop("good")
        reference = by_base(head, own, chunk_tokens)
        policy = log_probs(head, own, chunk_tokens)
        reward = self.beta * (policy - reference)
        away = torch.where(good, reward - self.beta * kl, self.beta * kl - reward)
        losses = torch.where(good, self.desirable_weight, self.undesirable_weight) * torch.sigmoid(-away)
        total = (losses * weights).sum()
        of_good, of_bad = weights * good, weights * ~good
        shown = [(losses, weights), (torch.ones_like(weights), weights), (kl.expand_as(weights), weights)]
        for part in (of_good, of_bad):
            shown += [(torch.ones_like(weights), part), (reward, part), (policy, part)]
        return total.float(), torch.stack([(one.detach() * part).sum() for one, part in shown])

    def _moved_others(self, head: HeadSpec, batch: Batch, chunk_tokens: int | None) -> Tensor:
        """By how much the log-probabilities of answers to other prompts moved, [rows]; without dropout."""
        others = {key.removeprefix(_OTHER): value for key, value in batch.items() if key.startswith(_OTHER)}
        reference = by_base(head, others, chunk_tokens)
        mode = head.model.training
        head.model.eval()
        try:
            with torch.no_grad():
                return log_probs(head, others, chunk_tokens) - reference
        finally:
            head.model.train(mode)

    def metrics(self, sums: Sequence[float], *, training: bool) -> dict[str, float]:
        """Means over good answers (`.../chosen`) and bad ones (`.../rejected`); what there is none of is left out."""
        loss, count, kl, *rest = sums
        found = {"loss": loss / count if count else math.nan, "kl": kl / count if count else math.nan}
        for name, (of, reward, policy) in (("chosen", rest[:3]), ("rejected", rest[3:])):
            if of:
                found |= {f"rewards/{name}": reward / of, f"logps/{name}": policy / of}
        if "rewards/chosen" in found and "rewards/rejected" in found:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    def batch_without_values(self, rows: int, length: int, *, documents: int, device: torch.device) -> Batch:
        each = max(1, length // 2)
        batch = CausalLM(flat=self.flat).batch_without_values(rows, each, documents=1, device=device)
        batch["sizes"] = [each] * rows
        if self.precompute_reference:
            batch["reference"] = torch.zeros(rows, dtype=torch.float64, device=device)
        good = torch.ones(rows, device=device, dtype=torch.bool)
        return {**batch, **_named(batch), "good": good, "weights": torch.ones(rows, device=device)}


def _named(batch: Batch) -> Batch:
    return {f"{_OTHER}{key}": value for key, value in batch.items()}


def _mean(sums: Tensor) -> Tensor:
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)
