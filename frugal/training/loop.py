"""The training loop: rows in the plan's order, one optimizer step after another, and what is due between two."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from frugal.distributed import group as ranks
from frugal.distributed.device_wait import numbers
from frugal.errors import Interrupted
from frugal.memory.space import is_out_of_memory, recover
from frugal.training.evaluate import EvalResult, evaluate_rows, first_pass, to_device
from frugal.training.optim import set_lr, trainable
from frugal.training.schedule import TrainPlan, split_step
from frugal.training.setup import Hooks, LoopState, TrainSetup, rng_state, set_rng_state
from frugal.training.step import OptimizerStep

if sys.platform != "win32":
    import resource


T = TypeVar("T")

COMPARED_AFTER = (1, 5)
"""Steps after which the ranks' adapters are compared, beside the start: a fault that grows shows by then."""


def train_loop(setup: TrainSetup, hooks: Hooks, state: LoopState) -> LoopState:
    """Train from ``state.step`` to the plan's end; returns the final state.

    Raises Interrupted after saving when a stop was asked for, and FrugalError when loss or gradients stop being
    finite (the weights are then still those before that step).
    """
    step = setup.optimizer_step(loss_scaling=setup.loss_scaling)
    if state.loss_scaling:
        step.scaler.load_state_dict(state.loss_scaling)
    setup.wrapped.train()
    if state.step == 0 and setup.eval_rows is not None:
        first = _retrying(setup, hooks, lambda: _evaluate(setup))
        state.first_eval_loss = state.eval_loss = first.loss
        hooks.record({"step": 0, "epoch": 0.0, **_eval_record(first)})
    while state.step < setup.plan.total_steps:
        record = one_step(setup, step, state, hooks)
        if setup.eval_rows is not None and _due(setup.train.eval_steps, state.step, setup.plan):
            record.update(_evaluate_and_compare(setup, state, hooks))
        hooks.record(record)
        if state.step in COMPARED_AFTER:
            compare_ranks(setup, f"after step {state.step}")
        exit_code = ranks.any_rank(hooks.stop.exit_code)
        best_now = setup.keep_best and state.best_step == state.step
        if exit_code is not None or best_now or _due(setup.save_steps, state.step, setup.plan):
            state.loss_scaling = step.scaler.state_dict() if setup.loss_scaling else {}
            hooks.save(state)
        if exit_code is not None and state.step < setup.plan.total_steps:
            raise Interrupted(
                f"stopped after step {state.step} of {setup.plan.total_steps}; checkpoint-{state.step} is saved. "
                "Go on with --resume.",
                exit_code,
            )
    return state


def compare_ranks(setup: TrainSetup, when: str) -> None:
    """Raise, naming the first, when a trained tensor differs between the ranks."""
    if ranks.world_size() > 1:
        ranks.compare(setup.strategy.digests(trainable(setup.module.model)), when)


def one_step(setup: TrainSetup, step: OptimizerStep, state: LoopState, hooks: Hooks | None = None) -> dict[str, Any]:
    """Do the optimizer step that follows ``state``. Returns its record."""
    begun = time.perf_counter()
    rows = setup.order.rows_of(state.step)
    # known from the data, on every rank alike: the one division of the whole step, over micro-batches and ranks
    targets = setup.objective.targets(setup.rows, rows)
    if targets == 0:
        raise AssertionError(f"step {state.step}: rows without targets reached the loop: {rows}")
    lr = set_lr(setup.optimizer, setup.lr_lambda(state.step))
    name = f"step {state.step + 1}"
    sums, norm = _retrying(setup, hooks, lambda: _forward_backward(setup, step, rows, targets, name))
    totals = _read(sums, targets)
    metrics = setup.objective.metrics(totals, training=True)
    if norm is None:
        scale_before = step.scaler.get_scale()
        norm = step.update(metrics["loss"], name=name, rows=rows)
        if setup.loss_scaling and step.scaler.get_scale() < scale_before:
            state.skipped_steps += 1
    seconds = time.perf_counter() - begun
    tokens = int(setup.rows.lengths[rows].sum())
    state.step += 1
    state.tokens += tokens
    state.seconds += seconds
    state.last_loss = metrics["loss"]
    return {
        "step": state.step,
        "epoch": setup.plan.epoch_of(state.step),
        **metrics,
        "learning_rate": lr,
        "grad_norm": norm,
        "tokens": tokens,
        "trained_tokens": int(setup.rows.num_targets[rows].sum()),
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(setup.device),
        **({"reserved_memory_bytes": torch.cuda.max_memory_reserved()} if setup.device.type == "cuda" else {}),
        "rows_sha256": rows_sha256(rows),
    }


def _retrying(setup: TrainSetup, hooks: Hooks | None, action: Callable[[], T]) -> T:
    """Do ``action``; after an out-of-memory from the same state again, with smaller memory settings."""
    first = True
    while True:
        generators = rng_state(setup.device)
        try:
            return action()
        except Exception as error:
            # several ranks would have to agree on a change in the middle of a collective operation
            if hooks is None or hooks.out_of_memory is None or ranks.world_size() > 1 or not is_out_of_memory(error):
                raise
            shortage = recover(error, first=first)
        setup.strategy.zero_grad(setup.optimizer)
        set_rng_state(generators, setup.device)
        hooks.out_of_memory(shortage)
        first = False


def _forward_backward(
    setup: TrainSetup, step: OptimizerStep, rows: list[int], targets: int, name: str
) -> tuple[torch.Tensor, float | None]:
    """The step's sums, with its gradients left in place; or with the update done already, and then the norm."""
    # the settings are read each time: they may have changed, and then gradients of smaller micro-batches add up
    micro = setup.memory.micro_batch_rows
    mine = split_step(rows, micro=micro, rank=ranks.rank(), world_size=ranks.world_size())

    def batches() -> Iterator[dict[str, Any]]:
        return (micro_batch(setup, each, rows[0]) for each in mine)

    made = batches()
    objective = setup.objective
    if objective.two_passes:
        figure = first_pass(setup.wrapped, objective, made, ranks.world_size())
        made = (objective.second_pass(batch, figure) for batch in batches())
    if setup.step_in_backward and len(rows) <= micro:
        return step.forward_backward_update(next(made), targets, name=name)
    return step.forward_backward(made, len(mine), targets), None


def _read(sums: torch.Tensor, targets: int) -> list[float]:
    """The objective's sums over all ranks, as numbers. Reads the device, once a step."""
    if ranks.world_size() > 1:
        torch.distributed.all_reduce(sums)
    totals = numbers(sums)
    if totals[1] != targets and math.isfinite(totals[0]):  # a loss that is not a number has a message of its own
        raise AssertionError(f"{totals[1]} targets reached the loss, the rows hold {targets}")
    return totals


def micro_batch(setup: TrainSetup, rows: list[int], spare: int) -> dict[str, Any]:
    """A micro-batch; an empty one becomes ``spare`` with nothing to train, which adds exactly 0 on this rank."""
    batch = setup.objective.collate(setup.rows, rows or [spare])
    return to_device(batch if rows else setup.objective.without_targets(batch), setup.device)


def _due(every: int | None, step: int, plan: TrainPlan) -> bool:
    """Every so many steps, or at the end of each epoch; always at the end of the run."""
    return step == plan.total_steps or step % (every or plan.steps_per_epoch) == 0


def _evaluate(setup: TrainSetup) -> EvalResult:
    assert setup.eval_rows is not None
    result = evaluate_rows(
        setup.wrapped,
        setup.eval_rows,
        setup.objective,
        batch_size=setup.memory.eval_batch_rows,
        device=setup.device,
        rank=ranks.rank(),
        world_size=ranks.world_size(),
    )
    setup.strategy.rest(setup.wrapped)
    return result


def _evaluate_and_compare(setup: TrainSetup, state: LoopState, hooks: Hooks) -> dict[str, float]:
    result = _retrying(setup, hooks, lambda: _evaluate(setup))
    state.eval_loss = result.loss
    if state.best_eval_loss is None or result.loss < state.best_eval_loss:
        state.best_eval_loss, state.best_step = result.loss, state.step
    return _eval_record(result)


def _eval_record(result: EvalResult) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in result.metrics.items()}


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
