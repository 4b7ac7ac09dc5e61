"""What is trained for: rows to a batch, the loss, the metrics. One file and one row of `registry.OBJECTIVES` each."""

from frugal.objectives.base import Objective
from frugal.objectives.registry import OBJECTIVES, LossModule, configured_objective, make_objective

__all__ = ["OBJECTIVES", "LossModule", "Objective", "configured_objective", "make_objective"]
