"""Which rows make each optimizer step: a pure function of lengths, seed, epoch and global batch.

It knows nothing of micro-batches or ranks, so a run resumed with other ones trains the same rows in the same steps.
"""

from __future__ import annotations

import numpy as np

_MEGA_BATCH = 50
"""Steps whose rows are sorted by length together. More: less padding; fewer: more random."""
_JITTER = 0.1
"""Lengths are sorted as if up to this part longer, so that neighbours change from epoch to epoch."""


def step_batches(
    lengths: np.ndarray, *, seed: int, epoch: int, global_batch: int, group_by_length: bool
) -> list[np.ndarray]:
    """Row numbers of each optimizer step of an epoch.

    Every row comes once an epoch. All steps have ``global_batch`` rows, only the last one may have fewer. With
    ``group_by_length`` rows of like length share a step: shuffled rows are cut into spans of 50 steps, each span is
    sorted by length (give or take a tenth, else small data would have the same steps in every epoch), and the order of
    the steps is shuffled again.

    Args:
        lengths: int [rows], tokens of each row; looked at only with ``group_by_length``.
        seed: the run's seed.
        epoch: 0-based; every epoch has its own order.
        global_batch: rows of a step over all micro-batches and ranks.

    Returns:
        int64 arrays, one a step.
    """
    if global_batch < 1:
        raise ValueError(f"global_batch must be at least 1, got {global_batch}")
    rows = len(lengths)
    # PCG64 and SeedSequence give the same numbers on every machine and version of numpy.
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    order = random.permutation(rows).astype(np.int64)
    if group_by_length:
        span = _MEGA_BATCH * global_batch
        sizes = np.asarray(lengths) * (1 + _JITTER * random.random(rows))
        parts = [order[at : at + span] for at in range(0, rows, span)]
        order = np.concatenate([part[np.argsort(-sizes[part], kind="stable")] for part in parts] or [order])
    steps = [order[at : at + global_batch] for at in range(0, rows, global_batch)]
    if group_by_length and len(steps) > 1:
        short = steps.pop() if len(steps[-1]) < global_batch else None
        steps = [steps[place] for place in random.permutation(len(steps))]
        if short is not None:
            steps.append(short)
    return steps
