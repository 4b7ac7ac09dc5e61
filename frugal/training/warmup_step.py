"""The warm-up step before training: the longest micro-batch of the whole run, through all that a step does.

What does not fit shows here, at step 0, and not hours later. Adapter, optimizer state and random generators are put
back bit for bit, so that a run with a warm-up step is the run without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from frugal.distributed import group as ranks
from frugal.memory.meter import LiveBytesMeter
from frugal.training.evaluate import evaluate_rows, longest_first
from frugal.training.loop import micro_batch
from frugal.training.schedule import StepOrder, TrainPlan, split_step
from frugal.training.setup import TrainSetup, rng_state, set_rng_state
from frugal.training.step import OptimizerStep


@dataclass(frozen=True)
class WarmupResult:
    """Peaks of the warm-up step. On a CPU of live tensors, on CUDA of the allocator."""

    step_bytes: int
    eval_bytes: int
    """0: nothing is evaluated."""
    save_bytes: int
    """0: no checkpoint was written."""
    rows: int
    tokens: int
    """Of the micro-batch that was run, padding counted."""
    reserved_bytes: int = 0
    """Most that CUDA's allocator held, with holes and what it keeps: what runs out. 0 on a CPU."""


def micro_batch_tokens(lengths: np.ndarray, rows: list[int], *, flat: bool) -> int:
    """Tokens that a micro-batch of these rows computes on."""
    picked = lengths[rows]
    return int(picked.sum()) if flat else int(picked.max()) * len(rows)


MOST_STEPS_LOOKED_THROUGH = 100_000
"""Steps of a plan that are looked at one by one: a few seconds."""


def longest_micro_batch(
    order: StepOrder, plan: TrainPlan, lengths: np.ndarray, *, micro: int, flat: bool, first_step: int = 0
) -> list[int]:
    """Row ids of the micro-batch with the most tokens among all steps from ``first_step`` on, on any rank.

    Of runs too long to be looked through: the longest rows together, at least as much as any of their micro-batches.
    """
    if plan.total_steps - first_step > MOST_STEPS_LOOKED_THROUGH:
        return [int(row) for row in np.argsort(-lengths, kind="stable")[:micro]]
    world = ranks.world_size()
    longest: list[int] = []
    most = -1
    for step in range(first_step, plan.total_steps):
        step_rows = order.rows_of(step)
        for rank in range(world):
            for rows in split_step(step_rows, micro=micro, rank=rank, world_size=world):
                tokens = micro_batch_tokens(lengths, rows, flat=flat) if rows else 0
                if tokens > most:
                    longest, most = rows, tokens
    return longest


def run_warmup_step(
    setup: TrainSetup, *, first_step: int = 0, limit_bytes: int | None = None, save: Callable[[], None] | None = None
) -> WarmupResult:
    """Run a step, an evaluation batch, then ``save``, which writes a checkpoint and removes it.

    ``limit_bytes``: the budget, enforced by the meter where storages are followed (not on CUDA, whose allocator has a
    limit of its own).

    Raises what an out-of-memory raises; everything is put back then too.
    """
    flat, lengths = setup.objective.flat, setup.rows.lengths
    micro = setup.memory.micro_batch_rows
    rows = longest_micro_batch(setup.order, setup.plan, lengths, micro=micro, flat=flat, first_step=first_step)

    reserved = [0]

    def peak(action: Callable[[], object]) -> int:
        # by name: with parameters offloaded the first of them is on the host, while the step is on the GPU
        with LiveBytesMeter(setup.module, setup.optimizer, device=setup.device, limit_bytes=limit_bytes) as meter:
            action()
        reserved.append(meter.reserved_bytes)
        return meter.peak_bytes

    with put_back(setup):
        # an overflow leaves out the update, which is to be measured: no loss scaling
        step = setup.optimizer_step(loss_scaling=False)
        step.put_state()  # a later step, which finds it, needs the most
        step_bytes = peak(lambda: _run(setup, step, rows))
        evaluated = _longest_eval_batch(setup)
        eval_bytes = 0 if evaluated is None else peak(evaluated)
        setup.strategy.rest(setup.wrapped)
        save_bytes = 0 if save is None else peak(save)
    return WarmupResult(
        step_bytes, eval_bytes, save_bytes, len(rows), micro_batch_tokens(lengths, rows, flat=flat), max(reserved)
    )


def _run(setup: TrainSetup, step: OptimizerStep, rows: list[int]) -> None:
    """One optimizer step over ``rows``; of several micro-batches one that finds the gradients of an earlier one."""
    setup.wrapped.train()
    targets = max(1, setup.objective.targets(setup.rows, rows))
    accumulates = setup.plan.global_batch > setup.memory.micro_batch_rows * ranks.world_size()
    if setup.step_in_backward and not accumulates:
        step.forward_backward_update(micro_batch(setup, rows, rows[0]), targets, name="warm-up step")
        return
    micro_batches = 1
    if accumulates:
        if setup.strategy.gradients_wait:  # whole, until they are reduced: a first micro-batch puts them there
            micro_batches = 2
        else:
            step.put_gradients()
    step.forward_backward((micro_batch(setup, rows, rows[0]) for _ in range(micro_batches)), micro_batches, targets)
    step.update()


def _longest_eval_batch(setup: TrainSetup) -> Callable[[], object] | None:
    """Evaluates the batch with the most tokens; None: nothing is evaluated."""
    data = setup.eval_rows
    if data is None:
        return None
    chosen = longest_first(data.lengths)[: setup.memory.eval_batch_rows]
    bounds = data.row_docs
    picked = data.grouped([range(int(bounds[row]), int(bounds[row + 1])) for row in chosen])
    return lambda: evaluate_rows(setup.wrapped, picked, setup.objective, batch_size=len(chosen), device=setup.device)


@contextmanager
def put_back(setup: TrainSetup) -> Iterator[None]:
    """Weights, optimizer state, random generators and mode afterwards are those before, bit for bit."""
    generators = rng_state(setup.device)
    training = setup.module.training
    put_back_tensors = setup.strategy.remember(setup.optimizer)
    try:
        yield
    finally:
        setup.strategy.zero_grad(setup.optimizer)
        setup.strategy.rest(setup.wrapped)
        put_back_tensors()
        setup.wrapped.train(training)
        set_rng_state(generators, setup.device)
