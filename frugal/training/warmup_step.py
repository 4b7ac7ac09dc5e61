"""The first step before the first step: the longest micro-batch of the whole run, through all that a step does.

What does not fit shows here, at step 0, and not hours later. Adapter, optimizer state and random generators are put
back bit for bit, so that a run with a probe is the run without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from frugal.data import collate
from frugal.distributed import group as ranks
from frugal.distributed.optimizer_state import named_parameters
from frugal.distributed.strategy import Strategy
from frugal.memory.meter import LiveBytesMeter
from frugal.training.evaluate import evaluate_rows, to_device
from frugal.training.in_backward import OptimizerInBackward
from frugal.training.job import Job
from frugal.training.randomness import rng_state, set_rng_state
from frugal.training.schedule import StepOrder, TrainPlan, split_window


@dataclass(frozen=True)
class ProbeResult:
    """Peaks of the probe. On a CPU of live tensors, on CUDA of the allocator."""

    step_bytes: int
    eval_bytes: int
    """0: nothing is evaluated."""
    save_bytes: int
    """0: no checkpoint was written."""
    rows: int
    tokens: int
    """Of the micro-batch that was probed, padding counted."""


def micro_batch_tokens(lengths: np.ndarray, rows: list[int], *, flat: bool) -> int:
    """Tokens that a micro-batch of these rows computes on."""
    picked = lengths[rows]
    return int(picked.sum()) if flat else int(picked.max()) * len(rows)


def longest_micro_batch(
    order: StepOrder, plan: TrainPlan, lengths: np.ndarray, *, micro: int, flat: bool, first_step: int = 0
) -> list[int]:
    """Row ids of the micro-batch with the most tokens among all steps from ``first_step`` on, on any rank."""
    world = ranks.world_size()
    longest: list[int] = []
    most = -1
    for step in range(first_step, plan.total_steps):
        window = order.rows_of(step)
        for rank in range(world):
            for rows in split_window(window, micro=micro, rank=rank, world_size=world):
                tokens = micro_batch_tokens(lengths, rows, flat=flat) if rows else 0
                if tokens > most:
                    longest, most = rows, tokens
    return longest


def longest_first(lengths: np.ndarray) -> list[int]:
    """Row ids as evaluation takes them."""
    return sorted(range(len(lengths)), key=lambda row: (-int(lengths[row]), row))


def longest_eval_rows(job: Job) -> list[int]:
    """Row ids of the evaluation batch with the most tokens."""
    if job.eval_rows is None:
        return []
    return longest_first(job.eval_rows.lengths)[: job.train.per_device_eval_batch_size]


def run_probe(
    job: Job, *, first_step: int = 0, limit_bytes: int | None = None, save: Callable[[], None] | None = None
) -> ProbeResult:
    """Run it: a step, an evaluation, then ``save``, which writes a checkpoint and removes it.

    ``limit_bytes``: the budget, enforced by the meter where storages are followed (not on CUDA, whose allocator has a
    limit of its own).

    Raises what an out-of-memory raises; everything is put back then too.
    """
    device = job.accelerator.device
    rows = longest_micro_batch(
        job.order,
        job.plan,
        job.rows.lengths,
        micro=job.train.per_device_train_batch_size,
        flat=job.flat,
        first_step=first_step,
    )
    with put_back(job):
        _have_state(job)
        with LiveBytesMeter(job.module, job.optimizer, limit_bytes=limit_bytes) as meter:
            _step(job, rows, device)
        step_bytes = meter.peak_bytes
        eval_bytes = 0
        chosen = longest_eval_rows(job)
        if chosen and job.eval_rows is not None:
            bounds = job.eval_rows.row_docs
            groups = [range(int(bounds[row]), int(bounds[row + 1])) for row in chosen]
            with LiveBytesMeter(job.module, job.optimizer, limit_bytes=limit_bytes) as meter:
                evaluate_rows(
                    job.wrapped,
                    job.eval_rows.grouped(groups),
                    batch_size=len(chosen),
                    pad_id=job.pad_id,
                    flat=job.flat,
                    device=device,
                )
            eval_bytes = meter.peak_bytes
            job.strategy.rest(job.wrapped)
        save_bytes = 0
        if save is not None:
            with LiveBytesMeter(job.module, job.optimizer, limit_bytes=limit_bytes) as meter:
                save()
            save_bytes = meter.peak_bytes
    tokens = micro_batch_tokens(job.rows.lengths, rows, flat=job.flat)
    return ProbeResult(step_bytes, eval_bytes, save_bytes, len(rows), tokens)


def _have_state(job: Job) -> None:
    """Optimizer state before the first step, so that a later one, which finds it, is what is measured.

    Not where an engine steps by itself: its first step is measured.
    """
    if job.optimizer.state or type(job.strategy).step is not Strategy.step:
        return
    for parameter in named_parameters(job.optimizer).values():
        parameter.grad = torch.zeros_like(parameter)
    job.optimizer.step()
    job.strategy.zero_grad(job.optimizer)


def _step(job: Job, rows: list[int], device: torch.device) -> None:
    """Forward, backward, norm and update of one micro-batch, as a step does them."""
    accumulates = job.train.gradient_accumulation_steps > 1
    if accumulates and not job.strategy.gradients_wait:  # later micro-batches find gradients there
        for parameter in named_parameters(job.optimizer).values():
            parameter.grad = torch.zeros_like(parameter)
    job.wrapped.train()
    batch = to_device(collate([job.rows[row] for row in rows], job.pad_id, flat=job.flat), device)
    if job.step_in_backward:
        loss_sum, count = job.wrapped(batch)
        with OptimizerInBackward(job.optimizer, gradient_accumulation_steps=1, max_grad_norm=0.0):
            (loss_sum / count.clamp(min=1)).backward()
        return
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    # where gradients wait elsewhere (whole, until they are reduced), a first micro-batch puts them there
    for last in (False, True) if accumulates and job.strategy.gradients_wait else (True,):
        with job.strategy.accumulating(job.wrapped, last):
            loss_sum, count = job.wrapped(batch)
            job.strategy.backward(loss_sum / count.clamp(min=1), scaler)
        del loss_sum
    job.strategy.norm_and_clip(job.optimizer, job.train.max_grad_norm, scaler)
    job.strategy.step(job.optimizer, scaler)
    job.strategy.zero_grad(job.optimizer)


@contextmanager
def put_back(job: Job) -> Iterator[None]:
    """Weights, optimizer state, random generators and mode afterwards are those before, bit for bit."""
    device = job.accelerator.device
    generators = rng_state(device)
    training = job.module.training
    put_back_tensors = job.strategy.remember(job.optimizer)
    try:
        yield
    finally:
        job.strategy.zero_grad(job.optimizer)
        job.strategy.rest(job.wrapped)
        put_back_tensors()
        job.wrapped.train(training)
        set_rng_state(generators, device)
