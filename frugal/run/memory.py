"""A run's memory: the forecast before it starts, the warm-up step, and the fallback when it does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from frugal import host_memory
from frugal.config import Config
from frugal.data import PreparedData, TokenDataset
from frugal.decision import Decision
from frugal.device import Device
from frugal.distributed import group as ranks
from frugal.errors import FrugalError
from frugal.memory.device_memory import look
from frugal.memory.space import is_out_of_memory, recover
from frugal.planning.inputs import Planned
from frugal.planning.planner import Plan, Planner
from frugal.planning.simulated_model import Policy, Shape
from frugal.training.evaluate import longest_first
from frugal.training.oom_fallback import MemorySettings, OutOfMemoryFallback
from frugal.training.schedule import StepOrder, TrainPlan
from frugal.training.setup import TrainSetup
from frugal.training.warmup_step import (
    WarmupResult,
    longest_micro_batch,
    run_warmup_step,
)
from frugal.units import gib

CPU_SHARE = 0.5
"""Of the memory that is available on a machine without a GPU: other programs live there too."""


@dataclass
class Forecast:
    """What the plan said about this run; ``plan`` is None where it could not be made, for ``reason``."""

    plan: Plan | None
    policy: Policy
    reason: str


def make_planner(
    config: Config,
    architecture: Any,
    data: PreparedData,
    plan: TrainPlan,
    order: StepOrder,
    device: Device,
    dtype: Decision[torch.dtype],
    vocab_size: int,
    outside_bytes: int,
) -> Planner:
    """A planner of this run's largest micro-batch on this device, so far for one process.

    ``outside_bytes``: what this process holds on a GPU beside its allocator already.
    """
    available = host_memory.available_bytes()
    seen = look(device, outside_bytes=outside_bytes)
    others = max(ranks.gather(0 if seen is None else seen.others_bytes))  # every rank plans for the fullest device
    total = device.total_bytes if device.kind == "cuda" else int(CPU_SHARE * available)
    micro = config.train.per_device_train_batch_size
    rows = longest_micro_batch(order, plan, data.train.lengths, micro=micro, flat=True)
    evaluated = data.eval if data.eval is not None and len(data.eval) else None
    return Planner(
        config,
        Planned.of(replace(device, total_bytes=total), host_bytes=available, dtype=dtype, others_bytes=others),
        architecture,
        vocab_size=vocab_size,
        dataset_bytes=5 * data.train.tokens,
        optimizer_steps=plan.total_steps,
        longest=_shape(data.train, rows),
        eval_shape=None
        if evaluated is None
        else _shape(evaluated, longest_first(evaluated.lengths)[: config.train.per_device_eval_batch_size]),
        has_eval=evaluated is not None,
    )


def forecast(config: Config, planner: Planner) -> Forecast:
    """Plan with ``planner``; every rank follows the first one's choice."""
    asked = config.memory.checkpoint
    fallback: Policy = "recompute" if asked == "auto" else asked
    try:
        with torch.random.fork_rng(devices=[]):
            found = planner.plan(with_line=False, simulated=("steady_step", "evaluation"))
    except FrugalError:
        raise
    except Exception as error:  # a family that runs but cannot be simulated must still train; said and recorded
        return Forecast(None, _shared(fallback), f"no forecast for this model: {type(error).__name__}: {error}"[:500])
    why = "as configured" if asked != "auto" else "the fastest that fits" if found.fits else "the leanest"
    return Forecast(found, _shared(found.policy), why)


def _shape(data: TokenDataset, rows: list[int]) -> Shape:
    return Shape(len(rows), math.ceil(int(data.lengths[rows].sum()) / len(rows)), int(data.num_targets[rows].sum()))


def _shared(policy: Policy) -> Policy:
    chosen: list[Policy] = ranks.gather(policy)
    return chosen[0]


def start_fallback(memory: MemorySettings, found: Forecast, say: Callable[[str], None]) -> OutOfMemoryFallback:
    """The out-of-memory fallback of this run."""
    return OutOfMemoryFallback(memory, say, advice=lambda: _advice(found))


def _advice(found: Forecast) -> str:
    plan = found.plan
    if plan is None:
        return "Lower data.max_length or lora.r, or give it more memory (memory.budget)."
    rest = plan.phases["save"].bytes
    grown = plan.phases["steady_step"].bytes - rest
    spare = plan.budget_bytes - rest
    if spare <= 0:
        return (
            f"Weights, adapter and optimizer alone take {gib(rest)} of {gib(plan.budget_bytes)}: a smaller model or "
            "rank, model.quantize: nf4, or a larger memory.budget."
        )
    tokens = max(8, int(plan.shape.tokens * spare / max(grown, 1)))
    return f"About {tokens:,} tokens a micro-batch would fit: set data.max_length to that, or raise memory.budget."


def warm_up(
    config: Config, setup: TrainSetup, fallback: OutOfMemoryFallback, *, first_step: int, save: Callable[[], None]
) -> WarmupResult:
    """Run the warm-up step until it fits; ``save`` writes a checkpoint and removes it.

    Raises MemoryBudgetError when the fallback has nothing left to change.
    """
    limit = config.memory.budget_bytes if setup.device.type == "cpu" else None
    first = True
    while True:
        try:
            return run_warmup_step(setup, first_step=first_step, limit_bytes=limit, save=save)
        except Exception as error:
            if not is_out_of_memory(error) or ranks.world_size() > 1:
                raise
            shortage = recover(error, first=first)
        fallback.next(shortage)
        first = False


def measured_lines(found: Forecast, result: WarmupResult, taken: list[str]) -> list[str]:
    """Forecast and measurement side by side."""
    if found.plan is None:
        return [
            found.reason,
            f"measured: {gib(result.step_bytes)} at the longest micro-batch ({result.tokens:,} tokens)",
        ]
    expected = found.plan.phases["steady_step"].bytes
    difference = f"{result.step_bytes / expected - 1:+.1%}" if not taken else "after the changes above"
    reserved = f", {gib(result.reserved_bytes)} reserved by the allocator" if result.reserved_bytes else ""
    shown = [
        f"memory of the longest micro-batch ({result.tokens:,} tokens): forecast {gib(expected)}, "
        f"measured {gib(result.step_bytes)} ({difference}){reserved}"
    ]
    if result.eval_bytes and "evaluation" in found.plan.phases:
        foreseen = found.plan.phases["evaluation"].bytes
        shown.append(f"  evaluation: forecast {gib(foreseen)}, measured {gib(result.eval_bytes)}")
    if result.save_bytes:
        foreseen = found.plan.phases["save"].bytes
        shown.append(f"  checkpoint: forecast {gib(foreseen)}, measured {gib(result.save_bytes)}")
    return shown
