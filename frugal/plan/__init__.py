"""What a run will need, before it starts and without a GPU: the run's own code on tensors without memory.

`frugal.plan` is also a function (`frugal.plan(config)`), see docs/decisions/0002-public-names.md.
"""

from frugal.plan.api import make_planner, plan
from frugal.plan.plan import Plan, Planner

__all__ = ["Plan", "Planner", "make_planner", "plan"]
