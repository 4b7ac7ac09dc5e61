"""How many steps a run has, which rows each step sees, and the learning rate of each step.

All three are pure functions of the step number, so a resumed run needs nothing but that number: there is no sampler
state and no scheduler state to restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import get_scheduler

from frugal.config import TrainSection
from frugal.errors import ConfigError, DataError

_MEGA_BATCH = 50
"""Steps whose rows are sorted by length together. More: less padding; fewer: more random."""
_JITTER = 0.1
"""Lengths are sorted as if up to this part longer, so that neighbours change from epoch to epoch."""


@dataclass(frozen=True)
class TrainPlan:
    """The sizes of one run. Saved with every checkpoint and compared on resume."""

    rows: int
    """Training rows of an epoch."""
    global_batch: int
    """Rows of one optimizer step: per_device_train_batch_size x gradient_accumulation_steps x processes."""
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int

    def epoch_of(self, step: int) -> float:
        """Epochs done after ``step`` steps."""
        return step / self.steps_per_epoch

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self)


def make_plan(train: TrainSection, *, rows: int, world_size: int) -> TrainPlan:
    """Sizes of a run over ``rows`` rows on ``world_size`` processes; `max_steps` wins over `num_train_epochs`.

    Raises:
        ConfigError: the run ends before its warm-up does.
        DataError: there are no rows.
    """
    if rows < 1:
        raise DataError("there are no training rows. Check data.train, and data.eval_split, which takes rows away.")
    global_batch = train.per_device_train_batch_size * train.gradient_accumulation_steps * world_size
    steps_per_epoch = math.ceil(rows / global_batch)
    # 1e-9: 0.1 epochs of 10 steps is 1 step, not the 2 that ceil(1.0000000000000002) would give
    total = train.max_steps or max(1, math.ceil(train.num_train_epochs * steps_per_epoch - 1e-9))
    warmup = train.warmup_steps
    if warmup is None:  # rounded up, but a run of one step must not spend it at rate 0
        warmup = min(math.ceil(train.warmup_ratio * total - 1e-9), total - 1)
    if train.lr_scheduler_type == "constant":
        warmup = 0
    if warmup >= total:
        raise ConfigError(
            f"train.warmup_steps: {warmup} of warm-up in a run of {total} steps ({rows} rows, {global_batch} a step): "
            f"the learning rate would never reach train.learning_rate ({train.learning_rate:g}). Write at most "
            f"{total - 1}, leave train.warmup_steps out, or train for more steps."
        )
    return TrainPlan(rows, global_batch, steps_per_epoch, total, warmup)


class StepOrder:
    """Row ids of every step. Holds one epoch at a time; depends on nothing but its arguments."""

    def __init__(self, lengths: np.ndarray, plan: TrainPlan, *, seed: int, group_by_length: bool) -> None:
        """``lengths`` int64 [rows]: tokens of each row."""
        self._lengths = lengths
        self._plan = plan
        self._seed = seed
        self._group_by_length = group_by_length
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def rows_of(self, step: int) -> list[int]:
        """Row ids of step number ``step`` (0-based), at most `global_batch` of them, the same for any world size."""
        epoch, index = divmod(step, self._plan.steps_per_epoch)
        if epoch != self._epoch:
            self._batches = step_batches(
                self._lengths,
                seed=self._seed,
                epoch=epoch,
                global_batch=self._plan.global_batch,
                group_by_length=self._group_by_length,
            )
            self._epoch = epoch
            if len(self._batches) != self._plan.steps_per_epoch:
                raise AssertionError(f"epoch {epoch} has {len(self._batches)} steps, not {self._plan.steps_per_epoch}")
        return [int(row) for row in self._batches[index]]


def split_step(rows: list[int], *, micro: int, rank: int, world_size: int) -> list[list[int]]:
    """This rank's micro-batches of one optimizer step.

    Every rank gets the same number of micro-batches, because data parallelism needs all of them in the backward pass;
    a rank that has no row left in the last one gets an empty list there.
    """
    stride = micro * world_size
    count = max(1, math.ceil(len(rows) / stride))
    starts = [index * stride + rank * micro for index in range(count)]
    return [rows[start : start + micro] for start in starts]


def lr_lambda(train: TrainSection, plan: TrainPlan) -> Callable[[int], float]:
    """Factor on the learning rate for step number ``step`` (0-based), by transformers' schedule of that name.

    Past the end the factor stays what it was at the end: the cosine alone would climb again.
    """
    specific = {"min_lr_rate": train.min_lr_ratio} if train.lr_scheduler_type == "cosine_with_min_lr" else None
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        train.lr_scheduler_type,
        carrier,
        num_warmup_steps=plan.warmup_steps,
        num_training_steps=plan.total_steps,
        scheduler_specific_kwargs=specific,
    )
    raw = scheduler.lr_lambdas[0]
    return lambda step: float(raw(min(step, plan.total_steps)))


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
