"""What a run will need, before it starts and without a GPU: the run's own code on tensors without memory.

`frugal.plan` is also a function (`frugal.plan(config)`), see docs/decisions/0002-public-names.md. Names are imported
when they are first asked for: a base that is not there is told before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frugal.planning.api import make_planner, plan
    from frugal.planning.planner import Plan, Planner

_HOME = {"Plan": "planner", "Planner": "planner", "make_planner": "api", "plan": "api"}

__all__ = ["Plan", "Planner", "make_planner", "plan"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
