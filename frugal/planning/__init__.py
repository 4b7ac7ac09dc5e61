"""What a run will need, before it starts and without a GPU: the run's own code on tensors without memory.

`frugal.plan` is also a function (`frugal.plan(config)`), see docs/decisions/0002-public-names.md.
"""

from frugal.planning.api import make_planner, plan
from frugal.planning.planner import Plan, Planner

__all__ = ["Plan", "Planner", "make_planner", "plan"]
