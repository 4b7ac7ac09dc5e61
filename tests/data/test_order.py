"""Which rows make each step: every row once, the same on every machine, independent of everything but four numbers."""

from __future__ import annotations

import numpy as np
import pytest

from frugal.training.schedule import step_batches


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "batch"), [(20, 4), (21, 4), (3, 8), (1, 1), (1001, 8)])
def test_every_row_once_and_only_the_last_step_short(rows: int, batch: int, grouped: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, rows)
    steps = step_batches(lengths, seed=7, epoch=2, global_batch=batch, group_by_length=grouped)
    assert sorted(np.concatenate(steps).tolist()) == list(range(rows))
    assert [len(step) for step in steps[:-1]] == [batch] * (len(steps) - 1)
    assert len(steps) == -(-rows // batch)


def test_the_order_is_fixed_for_all_time() -> None:
    """A resumed run of a later version must train the same rows in the same steps."""
    steps = step_batches(np.arange(10), seed=42, epoch=0, global_batch=4, group_by_length=False)
    assert [step.tolist() for step in steps] == FIXED


FIXED = [[5, 6, 0, 7], [3, 2, 4, 9], [1, 8]]


def test_seed_and_epoch_change_the_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        steps = step_batches(np.arange(50), seed=seed, epoch=epoch, global_batch=5, group_by_length=True)
        return np.concatenate(steps).tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6


def test_steps_are_mixed_anew_each_epoch_when_every_length_differs() -> None:
    lengths = np.arange(100, 180)
    steps = [step_batches(lengths, seed=1, epoch=e, global_batch=8, group_by_length=True) for e in (0, 1)]
    first, second = ({frozenset(step.tolist()) for step in epoch} for epoch in steps)
    assert not first & second


def test_lengths_matter_only_when_grouping() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 100)
    plain = step_batches(lengths, seed=1, epoch=0, global_batch=8, group_by_length=False)
    other = step_batches(lengths[::-1], seed=1, epoch=0, global_batch=8, group_by_length=False)
    assert [step.tolist() for step in plain] == [step.tolist() for step in other]


def test_grouping_saves_padding_and_mixes_long_and_short_steps() -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, 4000)

    def padded(steps: list[np.ndarray]) -> int:
        return sum(len(step) * int(lengths[step].max()) for step in steps)

    grouped = step_batches(lengths, seed=1, epoch=0, global_batch=8, group_by_length=True)
    plain = step_batches(lengths, seed=1, epoch=0, global_batch=8, group_by_length=False)
    assert padded(grouped) < 1.05 * lengths.sum()
    assert padded(plain) > 1.6 * lengths.sum()
    longest = [int(lengths[step].max()) for step in grouped]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.1  # no trend from long to short


def test_a_global_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch"):
        step_batches(np.arange(3), seed=0, epoch=0, global_batch=0, group_by_length=False)
