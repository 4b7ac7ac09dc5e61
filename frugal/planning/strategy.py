"""`distributed.strategy: auto`: copies where the base fits each GPU, else everything shared."""

from __future__ import annotations

from dataclasses import dataclass, replace

from frugal.planning.planner import Planner
from frugal.planning.sharding import StrategyName
from frugal.planning.simulated_model import Shape
from frugal.units import gib


@dataclass(frozen=True)
class StrategyChoice:
    """How several ranks share a run."""

    strategy: StrategyName | None
    """None: one process."""
    shard_base: bool
    reason: str


def choose_strategy(planner: Planner) -> StrategyChoice:
    """What ``planner.strategy`` and ``planner.shard_base`` leave open, for ``planner.world_size`` ranks.

    Every rank must come to the same answer: call it where devices are alike, or on one rank for all.
    """
    if planner.world_size == 1:
        return StrategyChoice(None, False, "one process")
    asked = planner.strategy
    if asked in ("ddp", "zero1", "zero2"):
        return StrategyChoice(asked, False, f"distributed.strategy is {asked}: the base is whole on every GPU")
    if asked == "zero3":
        return StrategyChoice(asked, True, "distributed.strategy is zero3: everything is cut")
    if asked is not None and planner.shard_base is not None:
        return StrategyChoice(asked, planner.shard_base, "as configured")
    copies: StrategyName = "fsdp2" if asked == "fsdp2" else "ddp"
    if planner.shard_base is True:
        return StrategyChoice("fsdp2", True, "distributed.shard_base is true")
    need = least_bytes(replace(planner, strategy=copies, shard_base=False))
    shown = f"{gib(need)} of tensors on each GPU, {gib(planner.budget_bytes)} there"
    if need <= planner.budget_bytes or planner.shard_base is False:
        return StrategyChoice(copies, False, f"the base fits each GPU: {shown}")
    return StrategyChoice("fsdp2", True, f"the base does not fit each GPU: {shown}")


def least_bytes(planner: Planner) -> int:
    """Peak of load and of a step under the leanest policy that the configuration allows."""
    policy = planner.policies[-1]
    rows = planner.config.train.per_device_eval_batch_size
    evaluated = planner.eval_shape or Shape(rows, planner.config.data.max_length)
    peaks = [planner.load_peak(policy).bytes, planner.step_peak(policy).bytes]
    if planner.has_eval is not False:
        peaks.append(planner.simulation(policy).peak("evaluation", evaluated).bytes)
    return max(peaks)


def settled(planner: Planner) -> tuple[Planner, StrategyChoice]:
    """The same planner with strategy and shard_base decided."""
    choice = choose_strategy(planner)
    return replace(
        planner, strategy=choice.strategy, shard_base=choice.shard_base, strategy_reason=choice.reason
    ), choice
