"""Steps, rows and rates as pure functions of the step number."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest

from frugal.config import TrainSection
from frugal.errors import ConfigError, DataError
from frugal.training.schedule import StepOrder, lr_lambda, make_plan, split_step


def section(**changes: object) -> TrainSection:
    return TrainSection.model_validate({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **changes})


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"), [(20, 3, 12), (18, 3, 9), (19, 0.5, 2), (1, 1, 1), (60, 0.1, 1), (60, 0.25, 3)]
)
def test_number_of_steps(rows: int, epochs: float, steps: int) -> None:
    assert make_plan(section(num_train_epochs=epochs), rows=rows, world_size=1).total_steps == steps


def test_max_steps_wins_and_warmup() -> None:
    plan = make_plan(section(max_steps=7, warmup_ratio=0.3), rows=100, world_size=2)
    assert (plan.total_steps, plan.global_batch, plan.steps_per_epoch, plan.warmup_steps) == (7, 12, 9, 3)
    assert make_plan(section(warmup_steps=4), rows=100, world_size=1).warmup_steps == 4
    assert make_plan(section(lr_scheduler_type="constant"), rows=100, world_size=1).warmup_steps == 0


@pytest.mark.parametrize(
    ("changes", "rows"), [({"warmup_steps": 50, "num_train_epochs": 1}, 8), ({"warmup_steps": 1, "max_steps": 1}, 9)]
)
def test_a_warm_up_as_long_as_the_run_is_refused_with_both_numbers(changes: dict[str, float], rows: int) -> None:
    """F05: every step ran at a rate near 0, and the run succeeded."""
    plan_steps = changes.get("max_steps", 2)
    with pytest.raises(ConfigError, match=rf"{changes['warmup_steps']} of warm-up in a run of {plan_steps} steps"):
        make_plan(section(**changes), rows=rows, world_size=1)


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "cosine_with_min_lr"])
@pytest.mark.parametrize("warmup", [{"warmup_steps": 5}, {"warmup_ratio": 0.99}, {"warmup_steps": 0}])
def test_the_asked_rate_is_reached_in_every_run_that_starts(name: str, warmup: dict[str, float]) -> None:
    """F05: the rate of some step is train.learning_rate."""
    settings = section(max_steps=6, lr_scheduler_type=name, **warmup)
    factor = lr_lambda(settings, make_plan(settings, rows=9, world_size=1))
    assert max(factor(step) for step in range(6)) == 1.0


def test_a_single_step_is_not_spent_on_warming_up() -> None:
    for name in ("linear", "cosine", "constant_with_warmup", "cosine_with_min_lr"):
        settings = section(max_steps=1, warmup_ratio=0.5, lr_scheduler_type=name)
        assert lr_lambda(settings, make_plan(settings, rows=100, world_size=1))(0) == 1.0


def test_no_rows_is_a_data_error() -> None:
    with pytest.raises(DataError, match="no training rows"):
        make_plan(section(), rows=0, world_size=1)


def test_every_row_once_an_epoch_and_other_epochs_other_orders() -> None:
    lengths = np.arange(1, 21, dtype=np.int64)
    for grouped in (False, True):
        plan = make_plan(section(), rows=20, world_size=1)
        order = StepOrder(lengths, plan, seed=1, group_by_length=grouped)
        epochs = [[order.rows_of(epoch * 4 + index) for index in range(4)] for epoch in range(3)]
        for epoch in epochs:
            assert sorted(chain.from_iterable(epoch)) == list(range(20))
        if not grouped:
            assert epochs[0] != epochs[1] != epochs[2]
        # the middle of a later epoch, asked for first by a new object, is the same
        assert StepOrder(lengths, plan, seed=1, group_by_length=grouped).rows_of(6) == epochs[1][2]


@pytest.mark.parametrize(("micro", "world"), [(1, 1), (6, 1), (2, 1), (4, 1), (1, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("count", [1, 5, 6, 12])
def test_ranks_share_the_rows_of_a_window(micro: int, world: int, count: int) -> None:
    rows = list(range(100, 100 + count))
    shares = [split_step(rows, micro=micro, rank=rank, world_size=world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1  # as many backward passes on every rank
    assert sorted(chain.from_iterable(chain.from_iterable(shares))) == rows
    assert all(len(batch) <= micro for share in shares for batch in share)


def test_factors_by_hand() -> None:
    plan = make_plan(section(max_steps=100, warmup_steps=10), rows=10, world_size=1)
    cosine = lr_lambda(section(), plan)
    assert cosine(0) == 0.0
    assert cosine(5) == 0.5
    assert cosine(10) == 1.0
    assert cosine(55) == pytest.approx(0.5, abs=1e-12)
    assert cosine(100) == pytest.approx(0.0, abs=1e-12)
    floor = lr_lambda(section(lr_scheduler_type="cosine_with_min_lr", min_lr_ratio=0.1), plan)
    assert floor(55) == pytest.approx(0.55, abs=1e-12)
    assert floor(100) == pytest.approx(0.1, abs=1e-12)
    linear = lr_lambda(section(lr_scheduler_type="linear"), plan)
    assert linear(55) == 0.5
    assert linear(100) == 0.0
    assert lr_lambda(section(lr_scheduler_type="constant"), plan)(0) == 1.0
    assert lr_lambda(section(lr_scheduler_type="constant_with_warmup"), plan)(5) == 0.5


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"])
def test_after_the_end_the_rate_stays(name: str) -> None:
    plan = make_plan(section(max_steps=60, lr_scheduler_type=name), rows=10, world_size=1)
    factor = lr_lambda(section(lr_scheduler_type=name), plan)
    assert {factor(step) for step in (60, 61, 70, 100, 1000)} == {factor(60)}
    assert factor(60) == min(factor(step) for step in range(plan.warmup_steps, 61))


def test_the_unclamped_cosine_would_climb_again() -> None:
    """The oracle of R02: at 70/60 the plain formula is back at 0.067."""
    assert 0.5 * (1 + math.cos(math.pi * 70 / 60)) == pytest.approx(0.067, abs=1e-3)
    assert 0.5 * (1 + math.cos(math.pi * 50 / 60)) == pytest.approx(0.067, abs=1e-3)
