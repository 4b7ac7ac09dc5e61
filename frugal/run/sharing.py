"""How the processes of a run share it: what configuration, launcher and plan come to, and the strategy that does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from frugal.config import Config
from frugal.distributed import group as ranks
from frugal.distributed.launch import Engine, Launch, choose
from frugal.distributed.strategy import Strategy, make_strategy
from frugal.errors import ConfigError, FrugalError, UnsupportedError
from frugal.models.build import OnLayer, needs_whole_base
from frugal.models.resolve import ResolvedModel
from frugal.objectives import OBJECTIVES
from frugal.planning.api import choose_strategy
from frugal.planning.planner import Planner


@dataclass(frozen=True)
class Shared:
    """A decided way to share a run."""

    strategy: Strategy
    planner: Planner
    """For one of the ranks."""
    reason: str


def share(config: Config, launch: Launch, planner: Planner, device: torch.device) -> Shared:
    """Decide how the processes that there are share this run; every rank comes to the same answer.

    Raises ConfigError where configuration and launcher contradict each other, or a key asks for what the strategy
    cannot do.
    """
    asked = config.distributed
    engine = asked_engine(config, launch)
    make = partial(
        make_strategy,
        device=device,
        launch=launch,
        offload=asked.offload,
        micro_batch=config.train.per_device_train_batch_size,
        accumulation=config.train.gradient_accumulation_steps,
        max_grad_norm=config.train.max_grad_norm,
    )
    if engine is None:
        return Shared(make(None, shard_base=False), planner, "one process")
    # objectives over pairs run on copies only (`refuse_pairs`)
    is_open = asked.strategy == "auto" and launch.engine is None and planner.answers == 1
    base = None if asked.shard_base == "auto" else bool(asked.shard_base)
    planner = replace(planner, world_size=launch.world_size, strategy=None if is_open else engine, shard_base=base)
    name, cut, reason = ranks.on_first(lambda: _choice(planner))
    _refuse_keys(config, name)
    planner = replace(planner, strategy=name, shard_base=cut, strategy_reason=reason)
    strategy = make(name, shard_base=cut)
    return Shared(strategy, replace(planner, offload=strategy.offload), reason)


def asked_engine(config: Config, launch: Launch) -> Engine | None:
    """The engine that configuration and launcher name, if they leave it open the one of copies; None: one process.

    Raises ConfigError for what is wrong whatever the base is: to be called before anything is written or loaded.
    """
    asked = config.distributed
    engine = choose(asked.strategy, launch, base_fits=True)
    if engine is None:
        _refuse_keys(config, "one process")
    elif asked.strategy != "auto" or launch.engine is not None:
        _refuse_keys(config, engine)
    return engine


def refuse_pairs(config: Config, launch: Launch) -> None:
    """Raise UnsupportedError where a launcher cuts the tensors of a run on preferences, which reads log-probabilities
    of whole ones twice. What the configuration asks for, `frugal.config.conflicts` refuses."""
    name = config.objective.name
    if OBJECTIVES[name].answers > 1 and launch.engine not in (None, "ddp"):
        raise UnsupportedError(
            f"objective.name: {name} trains in one process or on whole copies of the base (ddp) so far, and accelerate "
            f"was started for {launch.engine}, which cuts tensors. Start it for copies: accelerate launch --multi_gpu "
            f"--num_processes {launch.world_size} -m frugal train CONFIG."
        )


def _choice(planner: Planner) -> tuple[str, bool, str]:
    try:
        found = choose_strategy(planner)
    except FrugalError:
        raise
    except Exception as error:  # a family that runs but cannot be simulated must still train
        told = f"no forecast for this model ({type(error).__name__}: {error})"[:300]
        if planner.strategy is None and planner.shard_base is not True:
            return "ddp", False, f"{told}: the base is whole on every GPU"
        name = planner.strategy or "fsdp2"
        cut = name == "zero3" or (name == "fsdp2" and planner.shard_base is not False)
        return name, cut, f"{told}: as configured, and everything cut"
    strategy, shard_base = found.value
    assert strategy is not None
    return strategy, shard_base, found.reason


def _refuse_keys(config: Config, name: str) -> None:
    asked = config.distributed
    if asked.shard_base is True and name not in ("fsdp2", "zero3"):
        raise ConfigError(
            f"distributed.shard_base is true, and {name} keeps the base whole. Start several processes with "
            "distributed.strategy: fsdp2 or zero3, or set shard_base to auto."
        )
    if asked.shard_base is False and name == "zero3":
        raise ConfigError(
            "distributed.shard_base is false, and zero3 cuts everything. Use zero2, or fsdp2 with shard_base: false."
        )
    if asked.offload is True and name in ("one process", "ddp"):
        raise ConfigError(
            f"distributed.offload is true, and {name} keeps everything on its device. Use distributed.strategy: fsdp2, "
            "zero2 or zero3 with several processes, or memory.checkpoint: offload for activations."
        )


def layer_taker(config: Config, base: ResolvedModel, strategy: Strategy) -> tuple[OnLayer | None, list[str]]:
    """What takes over layers while they are loaded, None where the base is loaded whole; and why that is so where the
    strategy would cut it."""
    if not strategy.cuts_base:
        return None, []
    if config.distributed.shard_base is not True and (why := needs_whole_base(base, config.lora)) is not None:
        return None, [f"each process loads the whole base before it is cut: {why}"]
    return strategy.take_layer, []
