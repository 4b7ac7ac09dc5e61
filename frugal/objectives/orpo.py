"""Odds-ratio preference optimisation: learn the chosen answer, and its odds against the rejected one. No reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.objectives.pairs import Answers, Pairs


@dataclass(frozen=True)
class ORPO(Pairs):
    """ORPO (arXiv 2403.07691, eq. 6): mean loss of the chosen answer's tokens + beta * -log sigmoid of the log odds
    ratio, both from mean log-probabilities of a token.

    TRL takes the first term over the prompt's tokens too, as a mean over a micro-batch's tokens, which changes with its
    size; here it is the paper's, of the answer, a pair at a time.
    """

    name: ClassVar[str] = "orpo"

    def of_pairs(
        self, policy: Answers, reference: Answers | None, tokens: Answers, *, training: bool
    ) -> tuple[Tensor, Answers]:
        chosen, rejected = policy.chosen / tokens.chosen.clamp(min=1), policy.rejected / tokens.rejected.clamp(min=1)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        return -chosen - self.beta * F.logsigmoid(log_odds), Answers(self.beta * chosen, self.beta * rejected)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation; finite at 0, which a sure answer rounds to."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    # each branch is given a harmless value where it is not taken: its gradient there would be infinity times 0
    small, large = x.where(near, -1.0), x.where(~near, -1.0)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
