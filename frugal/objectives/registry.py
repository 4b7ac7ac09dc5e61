"""Objectives by name, and the module that is trained for one: batches in, a sum of losses and sums that add up out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from frugal.config import ObjectiveSection
from frugal.models.head import HeadSpec, split_head
from frugal.objectives.base import Batch, Objective
from frugal.objectives.causal_lm import CausalLM
from frugal.objectives.dpo import DPO
from frugal.objectives.kto import KTO
from frugal.objectives.orpo import ORPO
from frugal.objectives.simpo import SimPO

OBJECTIVES: dict[str, type[Objective]] = {each.name: each for each in (CausalLM, DPO, ORPO, SimPO, KTO)}


def make_objective(name: str = "sft", **settings: Any) -> Objective:
    """The objective called ``name``; ``settings`` are its fields."""
    return OBJECTIVES[name](**settings)


def configured_objective(section: ObjectiveSection, *, label_smoothing: float = 0.0, **settings: Any) -> Objective:
    """The objective of a configuration: every key of ``section`` that is set and that it has a field for.

    ``label_smoothing``: `train.label_smoothing`, which smooths tokens; over pairs the section has one of its own.
    """
    kind = OBJECTIVES[section.name]
    known = {one.name for one in fields(kind)}
    given = {key: value for key, value in section.model_dump().items() if key in known and value is not None}
    smoothing = section.label_smoothing if kind.answers > 1 else label_smoothing
    return kind(**{**given, **settings, "label_smoothing": smoothing})


class LossModule(nn.Module):
    """Computes an objective's loss over a model's hidden states and head; what data parallelism wraps.

    ``model`` may be plain or a PEFT model; it is the only child, so gradients of its parameters are those that are
    reduced over ranks. Divides by nothing: `frugal.training.step` divides once, by the targets of the whole step.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None = None,
        *,
        chunk_tokens: int | None = None,
        prove: bool = True,
        head: HeadSpec | None = None,
    ) -> None:
        """``head``: what `split_head` found for ``model`` before, where it cannot be run by itself any more."""
        super().__init__()
        self.model = model
        self.objective = make_objective() if objective is None else objective
        self.head: HeadSpec = split_head(model, prove=prove) if head is None else head
        self.chunk_tokens = chunk_tokens
        """Tokens of one chunk of logits; None: by size."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`Objective.loss` of one batch; in evaluation mode without label smoothing."""
        return self.objective.loss(self.head, batch, training=self.training, chunk_tokens=self.chunk_tokens)
