"""The load phase by arithmetic: what is there already, and what the tensor being read takes beside its place.

A test holds it against measured loads (`tests/memory/test_plan_load.py`).
"""

from __future__ import annotations

from frugal.meter_report import TEMPORARIES
from frugal.plan.sharing import Sharing
from frugal.plan.sites import Peak
from frugal.plan.skeleton import Part


def load_peak(parts: list[Part], resting_bytes: int, sharing: Sharing | None = None) -> Peak:
    """Peak on one rank's device. ``resting_bytes``: the whole model with its adapters.

    The tensor that takes most beside its place is, at worst, the last. A base that is cut arrives layer by layer: of
    earlier ones a rank has its part, embedding and head are whole until the last layer is there.
    """
    extra = max(0, max((part.read_bytes + part.scratch_bytes - part.kept_bytes for part in parts), default=0))
    held = resting_bytes
    if sharing is not None and sharing.shard_base:
        units = sharing.units
        others = round((units.layers - 1) * units.layer * sharing.base_part)
        held = others + units.layer + units.embedding + units.head + units.root + units.buffers
    return Peak(held + extra, {"at rest": held, TEMPORARIES: extra}, "", "loading")
