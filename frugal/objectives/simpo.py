"""Simple preference optimisation: mean log-probabilities of the answers, apart by a margin. No reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from frugal.objectives.dpo import smoothed
from frugal.objectives.pairs import Answers, Pairs


@dataclass(frozen=True)
class SimPO(Pairs):
    """SimPO (arXiv 2405.14734, eq. 6); the margin is not multiplied by beta."""

    name: ClassVar[str] = "simpo"
    beta: float = 2.0
    simpo_gamma: float = 0.5

    def of_pairs(
        self, policy: Answers, reference: Answers | None, tokens: Answers, *, training: bool
    ) -> tuple[Tensor, Answers]:
        chosen = self.beta * policy.chosen / tokens.chosen.clamp(min=1)
        rejected = self.beta * policy.rejected / tokens.rejected.clamp(min=1)
        margin = chosen - rejected - self.simpo_gamma
        return smoothed(margin, self.label_smoothing if training else 0.0), Answers(chosen, rejected)
