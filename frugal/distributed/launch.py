"""How this process was started, read from its environment: by what launcher, for how many processes, for which engine.

Launchers fail silently. `accelerate launch --cpu --num_processes 2` starts one process; `mpirun` and `srun` start
several that know nothing of each other and each train the whole run; `ACCELERATE_USE_CPU=true` turns FSDP into plain
data parallelism. Here what was asked for is compared with what is there, before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from frugal.distributed.zero.config import launched_with, stage_of
from frugal.errors import ConfigError

Engine = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
Strategy = Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"]

DOCS = "docs/multi-gpu.md"
_COUNTS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_FSDP_OURS = {
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", "memory.checkpoint"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("fsdp_activation_checkpointing_offload", "memory.checkpoint: offload"),
}
"""What frugal has a key of its own for: (key of accelerate's YAML, ours)."""


@dataclass(frozen=True)
class Launch:
    """What the launcher says."""

    launcher: Literal["none", "torchrun", "accelerate launch"]
    world_size: int
    """Processes that were asked for."""
    local_world_size: int
    """Those on this machine."""
    engine: Engine | None = None
    """The engine that accelerate's YAML names; None: it leaves the choice open."""
    offload: bool = False
    """`fsdp_offload_params` of accelerate's YAML."""
    reshard_after_forward: bool | None = None
    """`fsdp_reshard_after_forward` of accelerate's YAML; None: not said."""
    notes: tuple[str, ...] = field(default=())
    """What was set and has no effect, one sentence each: to be shown once."""


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Read a launcher's environment variables (those of this process by default).

    Raises ConfigError when they contradict each other, ask for what frugal does not do, or show that several processes
    were asked for and this one stands alone.
    """
    env = os.environ if env is None else env
    together = "RANK" in env and "WORLD_SIZE" in env
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in env
    _refuse_alone(env, together=together, by_accelerate=by_accelerate)
    _refuse_unknown(env)
    world_size = int(env["WORLD_SIZE"]) if together else 1
    launcher: Literal["none", "torchrun", "accelerate launch"] = "none"
    if by_accelerate:
        launcher = "accelerate launch"
    elif together:
        launcher = "torchrun"
    fsdp = _flag(env, "ACCELERATE_USE_FSDP")
    notes = [*_notes(env), *(_fsdp_notes(env) if fsdp else [])]
    return Launch(
        launcher=launcher,
        world_size=world_size,
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", world_size)),
        engine=_engine(env, fsdp=fsdp),
        offload=fsdp and _flag(env, "FSDP_OFFLOAD_PARAMS"),
        reshard_after_forward=_reshard(env) if fsdp else None,
        notes=tuple(notes),
    )


def choose(asked: Strategy, launch: Launch, *, base_fits: bool) -> Engine | None:
    """The engine of this run: what the configuration asks, what the launcher asks, else what fits. None: one process.

    ``base_fits``: whether each device can hold the whole base beside a step of its own.

    Raises ConfigError when configuration and launcher name different engines, or a sharded one has one process only.
    """
    if asked != "auto" and launch.engine is not None and launch.engine != asked:
        raise ConfigError(
            f"distributed.strategy: {asked}, but accelerate was started for {launch.engine}. Set distributed.strategy "
            f"to auto or {launch.engine}, or start {_launched(asked)}."
        )
    engine = launch.engine if asked == "auto" else asked
    if launch.world_size == 1:
        if engine in (None, "ddp"):
            return None
        raise ConfigError(
            f"{_by(asked, launch)} shards a run over several processes, and there is one. Start more, for example "
            f"{_launched(engine)}. Or train in this one: distributed.strategy=auto, started without accelerate's FSDP "
            "or DeepSpeed."
        )
    if engine is None:
        return "ddp" if base_fits else "fsdp2"
    return engine


def check_group(launch: Launch, *, world_size: int, gpus: int) -> None:
    """Raise ConfigError unless the process group that now exists is the one that the launcher spoke of.

    ``world_size``: processes of the group, 1 without one. ``gpus``: GPUs that this process sees.
    """
    if world_size != launch.world_size:
        raise ConfigError(
            f"{launch.launcher} was asked for {launch.world_size} processes, and {world_size} found each other. Each "
            f"would train alone. See {DOCS}."
        )
    if gpus and launch.local_world_size > gpus:
        raise ConfigError(
            f"{launch.local_world_size} processes were started on this machine, which has {gpus} "
            f"GPU{'s' if gpus > 1 else ''}. Start one process a GPU: --num_processes {gpus}"
            + (" for each machine." if launch.world_size > launch.local_world_size else ".")
        )


def unused_gpus(launch: Launch, gpus: int) -> str | None:
    """How to use the other GPUs of this machine, when one process was started and sees several; else None."""
    if launch.world_size > 1 or gpus < 2:
        return None
    return (
        f"this machine has {gpus} GPUs, and this run uses the first. All of them: accelerate launch --num_processes "
        f"{gpus} -m frugal train CONFIG (or torchrun --nproc_per_node {gpus} -m frugal train CONFIG); {DOCS} says more."
    )


def _launched(engine: str) -> str:
    name = "zero2" if engine == "zero1" else engine  # no file of its own: --zero_stage 1 changes the other
    more = " --zero_stage 1" if engine == "zero1" else ""
    return (
        f"accelerate launch --config_file configs/accelerate/{name}.yaml{more} --num_processes 2 -m frugal train CONFIG"
    )


def _by(asked: Strategy, launch: Launch) -> str:
    return f"distributed.strategy: {asked}" if asked != "auto" else f"{launch.engine} of accelerate's configuration"


def _engine(env: Mapping[str, str], *, fsdp: bool) -> Engine | None:
    deepspeed = _flag(env, "ACCELERATE_USE_DEEPSPEED")
    if fsdp and deepspeed:
        raise ConfigError("accelerate was started for FSDP and for DeepSpeed: choose one.")
    if fsdp:
        version = env.get("FSDP_VERSION", "1")
        if version != "2":
            raise ConfigError(
                f"accelerate was started with fsdp_version: {version}; frugal shards with FSDP2. Set fsdp_version: 2 "
                "in accelerate's configuration, or use configs/accelerate/fsdp2.yaml."
            )
        return "fsdp2"
    return _zero(env) if deepspeed else None


def _zero(env: Mapping[str, str]) -> Engine:
    if env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() != "none":
        stage = str(stage_of(launched_with() or {}))
    else:
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage == "1":
        return "zero1"
    if stage == "2":
        return "zero2"
    if stage == "3":
        return "zero3"
    raise ConfigError(f"accelerate was started with DeepSpeed stage {stage}; frugal takes zero_stage 1, 2 or 3.")


def _reshard(env: Mapping[str, str]) -> bool | None:
    found = env.get("FSDP_RESHARD_AFTER_FORWARD", "").lower()
    return None if found not in ("true", "false") else found == "true"


def _refuse_alone(env: Mapping[str, str], *, together: bool, by_accelerate: bool) -> None:
    if together:
        return
    if "WORLD_SIZE" in env and int(env["WORLD_SIZE"]) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {env['WORLD_SIZE']} and RANK is not set, so this process cannot find the others. Start "
            "with torchrun or accelerate launch, or unset WORLD_SIZE."
        )
    if by_accelerate and "MASTER_PORT" in env and "RANK" not in env:
        raise ConfigError(
            "accelerate launch was asked for several processes and started one: it does so with --cpu, use_cpu: true, "
            "or distributed_type: 'NO'. Give it --config_file configs/accelerate/ddp.yaml (which works without GPUs "
            "too), or start with torchrun --nproc_per_node N -m frugal train CONFIG."
        )
    for name, launcher in _COUNTS.items():
        if env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1:
            raise ConfigError(
                f"{launcher} started {env[name]} processes ({name}), but RANK and WORLD_SIZE are not set: each would "
                f"train alone. Let {launcher} start one torchrun or accelerate launch on each machine instead; {DOCS} "
                "shows how."
            )


def _refuse_unknown(env: Mapping[str, str]) -> None:
    for name, what in (
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "tensor or context parallelism (parallelism_config)"),
    ):
        if _flag(env, name):
            raise ConfigError(
                f"accelerate was started for {what}, which frugal does not do. Use a file of configs/accelerate/."
            )


def _fsdp_notes(env: Mapping[str, str]) -> list[str]:
    for name, (theirs, ours) in _FSDP_OURS.items():
        if _flag(env, name):
            raise ConfigError(
                f"accelerate was started with {theirs}: true, which frugal does itself. Set it to false; {ours} says "
                "what is kept of each layer."
            )
    unheard = []
    if env.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP") not in ("TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        unheard.append("fsdp_auto_wrap_policy (a unit is a decoder layer)")
    if env.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT") != "FULL_STATE_DICT":
        unheard.append("fsdp_state_dict_type (checkpoints hold whole tensors)")
    if _flag(env, "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        unheard.append("fsdp_cpu_ram_efficient_loading (no process ever holds the whole base)")
    if env.get("FSDP_IGNORED_MODULES"):
        unheard.append("fsdp_ignored_modules")
    return [f"of accelerate's configuration this has no effect: {', '.join(unheard)}"] if unheard else []


def _notes(env: Mapping[str, str]) -> list[str]:
    notes = []
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        notes.append(f"accelerate's mixed_precision: {precision} has no effect: model.dtype decides")
    compiler = env.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() != "no":
        notes.append(f"accelerate's dynamo_backend: {compiler} has no effect: nothing is compiled")
    return notes


def _flag(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in ("true", "1", "yes", "on")
