"""Ranks that must have the same adapter: compared at the start, after the first step, and after a few."""

from __future__ import annotations

from collections.abc import Mapping

from frugal.distributed import group as ranks
from frugal.errors import UnsupportedError

COMPARED_AFTER = (1, 5)
"""Steps after which adapters are compared, beside the start: a fault that grows shows by then."""


def compare(digests: Mapping[str, str], when: str) -> None:
    """Raise on every rank, naming the first, when a trained tensor's digest differs between ranks.

    Each would train, and save, an adapter of its own. Every rank calls this at the same time.
    """
    mine = dict(digests)
    first = ranks.gather(mine)[0]
    bad = [name for name in first.keys() | mine.keys() if first.get(name) != mine.get(name)]
    for rank, found in enumerate(ranks.gather(sorted(bad))):
        if found:
            raise UnsupportedError(
                f"{when}, {len(found)} trained tensors of process {rank} differ from those of process 0, the first is "
                f"{found[0]}. All processes must start from the same seed, versions and base model, and compute alike."
            )
