"""The training loop: rows in the plan's order, one optimizer step a window, everything else between two steps."""

from __future__ import annotations

import gc
import hashlib
import math
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from frugal.data import collate
from frugal.distributed import group as ranks
from frugal.errors import FrugalError, Interrupted
from frugal.memory.pressure import is_out_of_memory
from frugal.training.evaluate import EvalResult, evaluate_rows, to_device
from frugal.training.in_backward import step_in_backward
from frugal.training.job import Hooks, Job, LoopState
from frugal.training.optim import set_rate, trainable
from frugal.training.randomness import rng_state, set_rng_state
from frugal.training.schedule import TrainPlan, split_window

if sys.platform != "win32":
    import resource


T = TypeVar("T")

COMPARED_AFTER = (1, 5)
"""Steps after which the ranks' adapters are compared, beside the start: a fault that grows shows by then."""


def train_loop(job: Job, hooks: Hooks, state: LoopState) -> LoopState:
    """Train from ``state.step`` to the plan's end; returns the final state.

    Raises Interrupted after saving when a stop was asked for, and FrugalError when loss or gradients stop being
    finite (the weights are then still those before that step).
    """
    scaler = torch.amp.GradScaler(job.accelerator.device.type, enabled=job.loss_scaling)
    if state.loss_scaling:
        scaler.load_state_dict(state.loss_scaling)
    job.wrapped.train()
    if state.step == 0 and job.eval_rows is not None:
        first = _climbing(job, hooks, lambda: _evaluate(job))
        state.first_eval_loss = state.eval_loss = first.loss
        hooks.record({"step": 0, "epoch": 0.0, "eval_loss": first.loss, "eval_perplexity": first.perplexity})
    while state.step < job.plan.total_steps:
        record = _one_step(job, scaler, state, hooks)
        if job.eval_rows is not None and _due(job.train.eval_steps, state.step, job.plan):
            record.update(_evaluate_and_compare(job, state, hooks))
        hooks.record(record)
        if state.step in COMPARED_AFTER:
            compare_ranks(job, f"after step {state.step}")
        exit_code = ranks.any_rank(hooks.stop.exit_code)
        best_now = job.keep_best and state.best_step == state.step
        if exit_code is not None or best_now or _due(job.save_steps, state.step, job.plan):
            state.loss_scaling = scaler.state_dict() if job.loss_scaling else {}
            hooks.save(state)
        if exit_code is not None and state.step < job.plan.total_steps:
            raise Interrupted(
                f"stopped after step {state.step} of {job.plan.total_steps}; checkpoint-{state.step} is saved. "
                "Go on with --resume.",
                exit_code,
            )
    return state


def compare_ranks(job: Job, when: str) -> None:
    """Raise, naming the first, when a trained tensor differs between the ranks."""
    if ranks.world_size() > 1:
        ranks.compare(job.strategy.digests(trainable(job.module.model)), when)


def _one_step(
    job: Job,
    scaler: torch.amp.GradScaler,
    state: LoopState,
    hooks: Hooks | None = None,
) -> dict[str, Any]:
    """One optimizer step. Returns its record."""
    begun = time.perf_counter()
    rows = job.order.rows_of(state.step)
    # known from the data, on every rank alike: the one division of the whole window, over micro-batches and ranks
    targets = int(job.rows.supervised[rows].sum())
    if targets == 0:
        raise AssertionError(f"step {state.step}: rows without targets reached the loop: {rows}")
    rate = set_rate(job.optimizer, job.rate_factor(state.step))
    loss, norm = _climbing(job, hooks, lambda: _loss_and_norm(job, scaler, rows, targets))
    stepped = norm is not None
    if not stepped:
        norm = job.strategy.norm_and_clip(job.optimizer, job.train.max_grad_norm, scaler)
    if not (math.isfinite(loss) and (norm is None or math.isfinite(norm) or job.loss_scaling)):
        job.strategy.zero_grad(job.optimizer)
        raise FrugalError(
            f"step {state.step + 1}: the loss is {loss} and the gradient norm {norm}. Training stopped before using "
            f"them; the rows of that step are {rows[:8]}. Lower train.learning_rate, or look at these rows."
        )
    scale_before = scaler.get_scale()
    if not stepped:
        norm_of_step = job.strategy.step(job.optimizer, scaler)
        norm = norm_of_step if norm is None else norm
    job.strategy.zero_grad(job.optimizer)
    if job.loss_scaling and scaler.get_scale() < scale_before:
        state.skipped_steps += 1
    seconds = time.perf_counter() - begun
    tokens = int(job.rows.lengths[rows].sum())
    state.step += 1
    state.tokens += tokens
    state.seconds += seconds
    state.last_loss = loss
    return {
        "step": state.step,
        "epoch": job.plan.epoch_of(state.step),
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": norm,
        "tokens": tokens,
        "trained_tokens": targets,
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(job.accelerator.device),
        "rows_sha256": rows_sha256(rows),
    }


def _climbing(job: Job, hooks: Hooks | None, action: Callable[[], T]) -> T:
    """Do ``action``; after an out-of-memory from the same state again, with what the ladder changed."""
    device = job.accelerator.device
    while True:
        generators = rng_state(device)
        try:
            return action()
        except Exception as error:
            # several ranks would have to agree on a rung in the middle of a collective operation
            if hooks is None or hooks.out_of_memory is None or ranks.world_size() > 1 or not is_out_of_memory(error):
                raise
            reason = str(error)
            traceback.clear_frames(error.__traceback__)
        job.strategy.zero_grad(job.optimizer)
        set_rng_state(generators, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        hooks.out_of_memory(reason)


def _loss_and_norm(job: Job, scaler: torch.amp.GradScaler, rows: list[int], targets: int) -> tuple[float, float | None]:
    """The window's loss, with its gradients left in place; or with the step done already, and then their norm."""
    # the micro-batch is looked at each time: the ladder may have made it smaller, and then gradients add up
    if job.step_in_backward and len(rows) <= job.train.per_device_train_batch_size:
        batch = to_device(_collate(job, rows, rows[0]), job.accelerator.device)
        return step_in_backward(job.wrapped, job.optimizer, batch, targets)
    return _accumulate(job, scaler, rows, targets), None


def _accumulate(job: Job, scaler: torch.amp.GradScaler, rows: list[int], targets: int) -> float:
    """Gradients of the window's token-mean loss; returns that loss (the same on all ranks)."""
    world = ranks.world_size()
    micro_batches = split_window(rows, micro=job.train.per_device_train_batch_size, rank=ranks.rank(), world_size=world)
    # engines average gradients over ranks, the loss is a sum over them: the strategy's factor undoes the average
    factor = job.strategy.loss_factor / targets
    device = job.accelerator.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for index, micro in enumerate(micro_batches):
        batch = to_device(_collate(job, micro, rows[0]), device)
        last = index == len(micro_batches) - 1
        # gradients are reduced once, in the backward pass of the last micro-batch
        with job.strategy.accumulating(job.wrapped, last):
            loss_sum, count = job.wrapped(batch)
            job.strategy.backward(loss_sum * factor, scaler)
        sums += torch.stack([loss_sum.detach().double(), count.double()])
    if world > 1:
        torch.distributed.all_reduce(sums)
    total, counted = float(sums[0]), int(sums[1])
    if counted != targets:
        raise AssertionError(f"{counted} targets reached the loss, the rows hold {targets}")
    return total / targets


def _collate(job: Job, micro: list[int], spare: int) -> dict[str, torch.Tensor]:
    """A micro-batch; an empty one becomes ``spare`` with nothing to train, which adds exactly 0 on this rank."""
    batch = collate([job.rows[row] for row in (micro or [spare])], job.pad_id, flat=job.flat)
    if not micro:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    return batch


def _due(every: int | None, step: int, plan: TrainPlan) -> bool:
    """Every so many steps, or at the end of each epoch; always at the end of the run."""
    return step == plan.total_steps or step % (every or plan.steps_per_epoch) == 0


def _evaluate(job: Job) -> EvalResult:
    assert job.eval_rows is not None
    result = evaluate_rows(
        job.wrapped,
        job.eval_rows,
        batch_size=job.train.per_device_eval_batch_size,
        pad_id=job.pad_id,
        flat=job.flat,
        device=job.accelerator.device,
        rank=ranks.rank(),
        world_size=ranks.world_size(),
    )
    job.strategy.rest(job.wrapped)
    return result


def _evaluate_and_compare(job: Job, state: LoopState, hooks: Hooks) -> dict[str, float]:
    result = _climbing(job, hooks, lambda: _evaluate(job))
    state.eval_loss = result.loss
    if state.best_eval_loss is None or result.loss < state.best_eval_loss:
        state.best_eval_loss, state.best_step = result.loss, state.step
    return {"eval_loss": result.loss, "eval_perplexity": result.perplexity}


def rows_sha256(rows: list[int]) -> str:
    """Fingerprint of which rows a step saw, in order: what resume and other world sizes must not change."""
    return hashlib.sha256(np.asarray(rows, dtype="<i8").tobytes()).hexdigest()[:16]


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the CUDA allocator since the run began, or of this process's resident memory on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
