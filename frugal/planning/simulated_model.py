"""One model on tensors without memory, and the parts of a training step run on it, each followed by the meter.

A micro-batch and the update after it are separate parts: the update knows no tokens, and the first step is a later one
without optimizer state, so neither is run again for every length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from frugal.config import LoraSection, MemorySection, ModelSection, ObjectiveSection, TrainSection
from frugal.device import Device
from frugal.distributed.strategy import OneProcess
from frugal.memory.checkpointing import apply_activation_checkpointing
from frugal.memory.meter import LiveBytesMeter
from frugal.memory.meter_report import OPTIMIZER, optimizer_tensors
from frugal.objectives import LossModule
from frugal.objectives.base import Batch
from frugal.ops.simulated import simulating
from frugal.planning.allocation_sites import SiteMeter, Sites, rest_without_gradients, subtract
from frugal.planning.skeleton import FakeRun, build_fake
from frugal.training.optim import build_optimizer, trainable
from frugal.training.step import OptimizerStep, optimizer_in_backward

Policy = Literal["none", "recompute", "offload", "disk"]
Phase = Literal["first_step", "steady_step", "evaluation"]
PHASES: tuple[Phase, ...] = ("first_step", "steady_step", "evaluation")
StepPart = Literal["micro_batch", "update", "evaluation"]
Parts = dict[StepPart, Sites]
"""A phase's parts, in their order."""


@dataclass(frozen=True)
class Shape:
    """One micro-batch: rows of equal length, that of a pair being both its documents'."""

    rows: int
    length: int
    targets: int | None = None
    """Tokens that are trained; None: all."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.rows * self.length


@dataclass
class Subject:
    """What is simulated: one configuration under one policy."""

    config: Any
    """The base's transformers configuration."""
    model: ModelSection
    lora: LoraSection
    train: TrainSection
    memory: MemorySection
    compute: torch.dtype
    device: Device
    vocab_size: int | None = None
    packed: bool = False
    documents: int = 1
    """Documents of a row."""
    policy: Policy = "recompute"
    scratch_dir: str | None = None
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    world_size: int = 1
    """Ranks of the run: with several the optimizer does not step inside backward."""


class SimulatedModel:
    """One model with its optimizer, and what was run with it."""

    def __init__(self, subject: Subject, config: Any) -> None:
        self.subject = subject
        on_cpu = subject.device.kind == "cpu"
        self.kind = "cpu" if on_cpu else "meta"
        # a CPU's branches need tensors that say they are on a CPU; a GPU's are those of plain tensors without memory
        self.mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if on_cpu else nullcontext()
        self.fake: FakeRun = build_fake(
            config,
            model=subject.model,
            lora=subject.lora,
            memory=subject.memory,
            compute=subject.compute,
            device=self.kind,
            mode=self.mode,
            vocab_size=subject.vocab_size,
            packed=subject.packed,
            objective=subject.objective,
        )
        self.module: LossModule = self.fake.module
        self.optimizer: Optimizer = build_optimizer(trainable(self.module.model), subject.train)
        self.step = OptimizerStep(
            self.module,
            self.optimizer,
            OneProcess(torch.device("cpu")),  # what several ranks change is arithmetic: `frugal.planning.sharding`
            max_grad_norm=subject.train.max_grad_norm,
        )
        apply_activation_checkpointing(self.module.model, subject.policy, scratch_dir=subject.scratch_dir)
        self._updates: dict[bool, Sites] = {}
        self._micro_batches: dict[Shape, Sites] = {}

    def simulating(self, targets: int | None = None) -> AbstractContextManager[None]:
        """Fake tensors inside are those of the subject's device."""
        return simulating(self.subject.device, targets=targets, attention=self.subject.memory.attention)

    @property
    def resting_bytes(self) -> int:
        """Weights and adapters."""
        return LiveBytesMeter(self.module, detail=True).report().start_bytes

    def run(self, phase: Phase, shape: Shape) -> Parts:
        """One phase with micro-batches of ``shape``."""
        if phase == "evaluation":
            return {"evaluation": self._evaluation(shape)}
        first = phase == "first_step"
        if self._steps_in_backward():
            return {"micro_batch": self._step_in_backward(shape, first)}
        micro_batch = self._micro_batch(shape)
        if first:
            micro_batch = subtract(micro_batch, OPTIMIZER, self.state_bytes())
        return {"micro_batch": micro_batch, "update": self._update(first)}

    def state_bytes(self) -> int:
        """Optimizer state once there is one."""
        with self.simulating(), self.mode:
            self.step.put_state()
        return sum(tensor.untyped_storage().nbytes() for tensor in optimizer_tensors(self.optimizer))

    def _micro_batch(self, shape: Shape) -> Sites:
        """Forward and backward of one micro-batch of a later step; with accumulation, of the step's second, which
        finds gradients (a third is like it)."""
        if shape not in self._micro_batches:
            with self.simulating(shape.targets), self.mode:
                self._prepare(first=False, gradients=self.subject.train.gradient_accumulation_steps > 1)
                meter = SiteMeter(self.module, self.optimizer, detail=True)
                with meter:
                    self.step.forward_backward(self._batches(shape), 1, targets=1)
                self.optimizer.zero_grad(set_to_none=True)
            self._micro_batches[shape] = rest_without_gradients(meter.sites())
        return self._micro_batches[shape]

    def _update(self, first: bool) -> Sites:
        """Norm, clipping and optimizer, with all gradients there."""
        if first not in self._updates:
            with self.simulating(), self.mode:
                self._prepare(first=first, gradients=True)
                meter = SiteMeter(self.module, self.optimizer, detail=True)
                with meter:
                    self.step.update()
            self._updates[first] = meter.sites()
        return self._updates[first]

    def _step_in_backward(self, shape: Shape, first: bool) -> Sites:
        with self.simulating(shape.targets), self.mode:
            self._prepare(first=first, gradients=False)
            meter = SiteMeter(self.module, self.optimizer, detail=True)
            with meter:
                self.step.forward_backward_update(next(self._batches(shape)), targets=1)
        return meter.sites()

    def _evaluation(self, shape: Shape) -> Sites:
        """One batch of `frugal.training.evaluate.evaluate_rows`."""
        with self.simulating(shape.targets), self.mode, torch.no_grad():
            self.step.put_state()
            self.module.eval()
            meter = SiteMeter(self.module, self.optimizer, detail=True)
            with meter:
                self.module(next(self._batches(shape)))
        return meter.sites()

    def _steps_in_backward(self) -> bool:
        train = self.subject.train
        return optimizer_in_backward(
            self.subject.memory.optimizer_in_backward,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            max_grad_norm=train.max_grad_norm,
            loss_scaling=self.subject.compute is torch.float16,
            world_size=self.subject.world_size,
        ).value

    def _prepare(self, *, first: bool, gradients: bool) -> None:
        """What exists when a part of a step begins: optimizer state (not in the first step), gradients."""
        if first:
            self.optimizer.state.clear()
        else:
            self.step.put_state()
        if gradients:
            self.step.put_gradients()
        self.module.train()

    def _batches(self, shape: Shape) -> Iterator[Batch]:
        """One micro-batch, made when it is asked for and not kept."""
        yield self.module.objective.batch_without_values(
            shape.rows, shape.length, documents=self.subject.documents, device=torch.device(self.kind)
        )
