"""`frugal.plan(...)`: from a configuration, or only a model's name, to a plan; decides `distributed.strategy: auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from frugal.config import Config
from frugal.decision import Decision
from frugal.errors import ConfigError
from frugal.objectives import OBJECTIVES
from frugal.planning.inputs import planned_device
from frugal.planning.planner import Plan, Planner
from frugal.planning.sharding import StrategyName
from frugal.planning.simulated_model import Shape
from frugal.planning.source import Source, as_config
from frugal.units import gib

MOST_TOKENS = 1 << 26
"""Of a micro-batch. Masks that are only described have its square of elements, times heads: a 64-bit number."""


def make_planner(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    vram: str | None = None,
    host_ram: str | None = None,
    tokens: int | None = None,
    world_size: int = 1,
    strategy: StrategyName | None = None,
    shard_base: bool | None = None,
    offload: bool = False,
    gpus_per_host: int | None = None,
) -> Planner:
    """A planner for ``source``: a configuration (object, mapping, YAML file), a model's folder, or a name.

    ``world_size`` ranks share the run by ``strategy`` (None: as `distributed.strategy` says, or as fits), of which
    ``gpus_per_host`` live on one machine.
    """
    config = as_config(source, overrides)
    if tokens is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"max_length": tokens})})
    _check_tokens(config)
    device = planned_device(config.model.dtype, gpu=gpu, vram=vram, host_ram=host_ram)
    asked = config.distributed
    if strategy is None and asked.strategy != "auto":
        strategy = asked.strategy
    if shard_base is None and asked.shard_base != "auto":
        shard_base = bool(asked.shard_base)
    planner = Planner.of(
        config,
        device,
        world_size=world_size,
        strategy=strategy,
        shard_base=shard_base,
        offload=offload or asked.offload is True,
        gpus_per_host=gpus_per_host,
    )
    return settled(planner)[0]


def _check_tokens(config: Config) -> None:
    settings, length = config.train, config.data.max_length * OBJECTIVES[config.objective.name].answers
    rows = max(settings.per_device_train_batch_size, settings.per_device_eval_batch_size)
    if rows * length > MOST_TOKENS:
        raise ConfigError(
            f"data.max_length (or --tokens) is {length:,} and a micro-batch has up to {rows} of such rows; a plan "
            f"takes up to {MOST_TOKENS:,} tokens. `frugal plan --sweep` shows how long a row may be."
        )


def plan(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    vram: str | None = None,
    host_ram: str | None = None,
    tokens: int | None = None,
    world_size: int = 1,
    strategy: StrategyName | None = None,
    shard_base: bool | None = None,
    offload: bool = False,
    gpus_per_host: int | None = None,
) -> Plan:
    """Forecast memory of a run, of which no weight is downloaded and no tensor allocated.

    Args:
        source: a configuration (object, mapping, YAML file), a model's folder, a public model's name, or a hub id.
        gpu: a GPU's name; vram: its memory ("12GB"), alone or instead of the table's; neither: the device found here.
        host_ram: memory of the machine, for plans made elsewhere.
        tokens: length of a row instead of data.max_length.
        world_size: ranks that share the run; the plan is that of one of them.
        strategy: ddp, fsdp2, zero1, zero2 or zero3; None: copies where the base fits each GPU, else fsdp2 with all cut.
        shard_base: whether fsdp2 cuts the frozen base too; None: where it does not fit whole.
        offload: shards and optimizer state rest on the host.
        gpus_per_host: ranks on one machine; None: all, up to eight.
    """
    planner = make_planner(source, overrides, gpu=gpu, vram=vram, host_ram=host_ram, tokens=tokens,
                           world_size=world_size, strategy=strategy, shard_base=shard_base, offload=offload,
                           gpus_per_host=gpus_per_host)  # fmt: skip
    return planner.plan()


class Sharing(NamedTuple):
    """How several ranks share a run."""

    strategy: StrategyName | None
    """None: one process."""
    shard_base: bool


def choose_strategy(planner: Planner) -> Decision[Sharing]:
    """What ``planner.strategy`` and ``planner.shard_base`` leave open, for ``planner.world_size`` ranks.

    Every rank must come to the same answer: call it where devices are alike, or on one rank for all.
    """
    decided = partial(Decision[Sharing], "distributed.strategy")
    if planner.world_size == 1:
        return decided(Sharing(None, False), "one process")
    asked = planner.strategy
    if asked in ("ddp", "zero1", "zero2"):
        return decided(Sharing(asked, False), f"distributed.strategy is {asked}: the base is whole on every GPU")
    if asked == "zero3":
        return decided(Sharing(asked, True), "distributed.strategy is zero3: everything is cut")
    if asked is not None and planner.shard_base is not None:
        return decided(Sharing(asked, planner.shard_base), "as configured")
    copies: StrategyName = "fsdp2" if asked == "fsdp2" else "ddp"
    if planner.shard_base is True:
        return decided(Sharing("fsdp2", True), "distributed.shard_base is true")
    need = least_bytes(replace(planner, strategy=copies, shard_base=False))
    shown = f"{gib(need)} of tensors on each GPU, {gib(planner.budget_bytes)} there"
    if need <= planner.budget_bytes or planner.shard_base is False:
        return decided(Sharing(copies, False), f"the base fits each GPU: {shown}")
    return decided(Sharing("fsdp2", True), f"the base does not fit each GPU: {shown}")


def least_bytes(planner: Planner) -> int:
    """Peak of load and of a step under the leanest policy that the configuration allows."""
    policy = planner.policies[-1]
    rows = planner.config.train.per_device_eval_batch_size
    evaluated = planner.eval_shape or Shape(rows, planner.row_length)
    peaks = [planner.load_peak(policy).bytes, planner.step_peak(policy).bytes]
    if planner.has_eval is not False:
        peaks.append(planner.simulation(policy).peak("evaluation", evaluated).bytes)
    return max(peaks)


def settled(planner: Planner) -> tuple[Planner, Decision[Sharing]]:
    """The same planner with strategy and shard_base decided."""
    choice = choose_strategy(planner)
    strategy, shard_base = choice.value
    return replace(planner, strategy=strategy, shard_base=shard_base, strategy_reason=choice.reason), choice
