"""Direct preference optimisation: the chosen answer above the rejected one, by how far each moved from the base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.objectives.pairs import Answers, Pairs


@dataclass(frozen=True)
class DPO(Pairs):
    """DPO (arXiv 2305.18290, eq. 7), IPO (2310.12036, eq. 17, by token as in TRL) or the hinge of SLiC (2305.10425)."""

    name: ClassVar[str] = "dpo"
    uses_reference: ClassVar[bool] = True
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"

    def of_pairs(
        self, policy: Answers, reference: Answers | None, tokens: Answers, *, training: bool
    ) -> tuple[Tensor, Answers]:
        assert reference is not None
        moved = Answers(policy.chosen - reference.chosen, policy.rejected - reference.rejected)
        rewards = Answers(self.beta * moved.chosen, self.beta * moved.rejected)
        margin = rewards.chosen - rewards.rejected
        if self.loss_type == "ipo":
            by_token = moved.chosen / tokens.chosen.clamp(min=1) - moved.rejected / tokens.rejected.clamp(min=1)
            return (by_token - 1 / (2 * self.beta)) ** 2, rewards
        if self.loss_type == "hinge":
            return torch.relu(1 - margin), rewards
        return smoothed(margin, self.label_smoothing if training else 0.0), rewards


def smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid of the margin, a part of the pairs taken to be the wrong way round."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
