"""All that a run decides before a weight is read: every `auto` of the configuration, once, each with its reason.

`open_machine` settles what depends on this machine alone, before anything is looked for; `resolve` the rest, when rows
and base are known. What was decided is written to the run's config.yaml and manifest.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from frugal.adapters.targets import tied_too
from frugal.config import Config
from frugal.data import PreparedData
from frugal.decision import Decision
from frugal.device import Device, needs_loss_scaling, resolve_dtype, usable
from frugal.distributed import group as ranks
from frugal.distributed.device_wait import numbers
from frugal.distributed.launch import Launch, check_group, read_launch, unused_gpus
from frugal.distributed.strategy import Strategy
from frugal.distributed.zero.config import import_deepspeed
from frugal.memory.device_memory import YOUNG_CONTEXT_BYTES, grow_segments, used_by_others
from frugal.models.attention import join_rows
from frugal.models.modules.host_embedding import decide_embedding
from frugal.models.positions import per_call_rotary, positions, refuse_mixed_lengths
from frugal.models.resolve import ResolvedModel
from frugal.models.skeleton import build_meta
from frugal.models.tokenizer import new_token_ids, rows_needed
from frugal.ops.registry import check_attention
from frugal.ops.rows import no_triton
from frugal.run.memory import Forecast, forecast, make_planner
from frugal.run.sharing import asked_engine, refuse_pairs, share
from frugal.training.device import device_of, make_accelerator
from frugal.training.schedule import StepOrder, TrainPlan
from frugal.training.step import optimizer_in_backward
from frugal.units import gib

PINNED = ("model.dtype", "memory.checkpoint", "memory.embedding", "memory.optimizer_in_backward")
"""Keys whose decided value replaces `auto` in the run's config.yaml. The others depend on where the run is resumed (how
many processes, how much memory): they stay `auto` there, with what was decided as a comment."""


@dataclass(frozen=True)
class Machine:
    """Where a run computes."""

    accelerator: Accelerator
    launch: Launch
    device: Device
    dtype: Decision[torch.dtype]
    in_backward: Decision[bool]
    notes: list[str]
    """About the launch, for the user."""
    outside_bytes: int = 0
    """Of a GPU's memory, what this process holds beside its allocator: the context, NCCL's buffers."""

    @property
    def decisions(self) -> list[Decision[Any]]:
        """`model.dtype` and `memory.optimizer_in_backward`."""
        name = str(self.dtype.value).removeprefix("torch.")  # as it is written in a configuration
        return [Decision(self.dtype.key, name, self.dtype.reason), self.in_backward]


def open_machine(config: Config) -> Machine:
    """Find launcher, process group and device, and decide what depends on them alone.

    Raises ConfigError or UnsupportedError for what cannot be whatever the base is.
    """
    usable()  # else a run would be on the CPU without a word, or end at its first kernel
    launch = read_launch()
    refuse_pairs(config, launch)
    asked_engine(config, launch)  # raises where configuration and launcher contradict each other
    train = config.train
    if launch.engine in ("zero1", "zero2", "zero3") and importlib.util.find_spec("deepspeed") is not None:
        import_deepspeed()  # accelerate imports it too, and would end with its traceback
    accelerator = make_accelerator(
        Path(config.output.dir), list(train.report_to), timeout_seconds=config.distributed.ddp_timeout
    )
    device = device_of(accelerator)
    gpus = torch.cuda.device_count() if device.kind == "cuda" else 0
    check_group(launch, world_size=ranks.world_size(), gpus=gpus)
    dtype = resolve_dtype(config.model.dtype, device)
    check_attention(device.torch_device, dtype.value, config.memory.attention)
    in_backward = optimizer_in_backward(
        config.memory.optimizer_in_backward,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        max_grad_norm=train.max_grad_norm,
        loss_scaling=needs_loss_scaling(dtype.value),
        world_size=ranks.world_size(),
    )
    segments = grow_segments()
    kernels = _without_kernels(device)
    outside = _settle(device, dtype.value)
    notes = [note for note in (*launch.notes, unused_gpus(launch, gpus), segments, kernels) if note]
    return Machine(accelerator, launch, device, dtype, in_backward, notes, outside)


def _settle(device: Device, dtype: torch.dtype) -> int:
    """Let the libraries that take a GPU's memory beside the allocator take theirs now, while there is room and before
    anything is planned: cuBLAS its handle, NCCL its buffers. Returns the bytes that this process holds there."""
    if device.kind != "cuda" or not torch.cuda.is_available():
        return 0
    ones = torch.ones(16, 16, device=device.torch_device, dtype=dtype)
    ones @ ones
    if ranks.world_size() == 1:
        return YOUNG_CONTEXT_BYTES
    ranks.meet()  # NCCL's first operation has a time limit; what comes before it has not
    before, _ = torch.cuda.mem_get_info(device.torch_device)
    first = ones[0, :1].float()
    torch.distributed.all_reduce(first)
    numbers(first)
    after, _ = torch.cuda.mem_get_info(device.torch_device)
    return YOUNG_CONTEXT_BYTES + max(0, before - after)


def _without_kernels(device: Device) -> str | None:
    """Says that this GPU trains without kernels; the first launch of one is tried here, before anything is loaded."""
    if device.kind != "cuda" or (reason := no_triton(device, torch.float32)) is None:
        return None
    return f"warning: operations take their torch forms, which are slower: {reason}"


@dataclass(frozen=True)
class RunSetup:
    """A run with nothing left open."""

    config: Config
    """The configuration with every `auto` that has a value replaced by it."""
    strategy: Strategy
    forecast: Forecast
    decisions: list[Decision[Any]]
    """Of the configuration's keys, by their dotted names."""
    comments: dict[str, str]
    """What to write beside keys of config.yaml that were `auto`: the reason, and the value where the key stays."""
    warnings: list[str] = field(default_factory=list)
    """What the user should know before weights are read."""
    others_bytes: int = 0
    """Of the device's memory, in use by others when the run was planned."""


def resolve(
    config: Config,
    machine: Machine,
    base: ResolvedModel,
    tokenizer: Any,
    data: PreparedData,
    plan: TrainPlan,
    order: StepOrder,
) -> RunSetup:
    """Decide what `open_machine` left: embedding, strategy, checkpoint policy and budget; every rank comes to the same.

    Raises ConfigError where a key asks for what the model or the strategy cannot do.
    """
    device, dtype = machine.device, machine.dtype
    warnings: list[str] = []
    skeleton = build_meta(base.config(), trust_remote_code=base.trust_remote_code)
    limit = positions(base.config(), skeleton)
    if limit is not None:
        found_long = [limit.check(part.document_lengths, name) for name, part in data.parts.items()]
        warnings = [warning for warning in found_long if warning]
    if (original := per_call_rotary(base.config())) is not None:
        for name, part in data.parts.items():
            key = f"per_device_{name}_batch_size"
            size = getattr(config.train, key)
            refuse_mixed_lengths(original, part.document_lengths, size, f"train.{key}", packing=config.data.packing)
    if (tied := tied_too(skeleton, config.lora)) is not None:
        warnings.append(tied)
    if config.data.packing:
        join_rows(skeleton, "", packing=True)  # raises before a weight is read
    added = new_token_ids(tokenizer, config.model.add_tokens)
    embedding = decide_embedding(
        config.memory.embedding, skeleton, config.lora, kind=device.kind, adds_tokens=bool(added)
    )
    rows = rows_needed(tokenizer, base.config())
    planner = make_planner(config, base.config(), data, plan, order, device, dtype, rows, machine.outside_bytes)
    shared = share(config, machine.launch, planner, machine.accelerator.device)
    planner, strategy = shared.planner, shared.strategy
    found = forecast(config, planner)
    if config.memory.budget != "auto":
        of_budget = "as configured"
    else:
        of_budget = "what the device leaves for tensors" if device.kind == "cuda" else "half of the memory available"
    others = planner.device.others_bytes
    if used := used_by_others(others, planner.device.total_bytes):
        of_budget += f"; {used}"
        warnings.append(used)
    decisions: list[Decision[Any]] = [
        *machine.decisions,
        embedding,
        Decision("memory.checkpoint", found.policy, found.reason),
        Decision("memory.budget", gib(planner.budget_bytes), of_budget),
        Decision("distributed.strategy", strategy.name, shared.reason),
    ]
    if strategy.world_size > 1:
        decisions.append(Decision("distributed.shard_base", strategy.cuts_base, shared.reason))
        decisions.append(Decision("distributed.offload", planner.offload, "as configuration or launcher say"))
    values, comments = config.model_dump(), {}
    for one in decisions:
        section, _, key = one.key.partition(".")
        if values[section][key] != "auto":
            continue
        if one.key in PINNED:
            values[section][key] = one.value
            comments[one.key] = f"auto: {one.reason}"
        else:
            comments[one.key] = f"{one.value}: {one.reason}"
    decisions += _formats(config, data)
    return RunSetup(Config.model_validate(values), strategy, found, decisions, comments, warnings, others)


def _formats(config: Config, data: PreparedData) -> Iterator[Decision[str]]:
    """How rows of each source turned out to be written."""
    for part, sources in (("train", config.data.train), ("eval", config.data.eval)):
        found = [one.format for one in data.report.sources if one.part == part]
        for index, (source, name) in enumerate(zip(sources, found, strict=False)):
            why = "the keys of its first rows" if source.format == "auto" else "as configured"
            yield Decision(f"data.{part}.{index}.format", name, why)
