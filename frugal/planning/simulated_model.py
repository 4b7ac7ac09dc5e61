"""One model on tensors without memory, and the parts of a training step run on it, each followed by the meter.

A micro-batch and the update after it are separate parts: the update knows no tokens, and the first step is a later one
without optimizer state, so neither is run again for every length.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from frugal.config import LoraSection, MemorySection, ModelSection, TrainSection
from frugal.memory.checkpointing import apply_activation_checkpointing
from frugal.memory.meter import LiveBytesMeter
from frugal.memory.meter_report import OPTIMIZER, optimizer_tensors
from frugal.ops.planned import PlannedDevice, planning_for
from frugal.planning.allocation_sites import SiteMeter, Sites, rest_without_gradients, without
from frugal.planning.skeleton import FakeRun, build_fake
from frugal.training.in_backward import OptimizerInBackward, place_of_step
from frugal.training.loss import LossModule
from frugal.training.optim import build_optimizer, trainable

Policy = Literal["none", "recompute", "offload", "disk"]
Phase = Literal["first_step", "steady_step", "evaluation"]
PHASES: tuple[Phase, ...] = ("first_step", "steady_step", "evaluation")
StepPart = Literal["micro_batch", "update", "evaluation"]
Parts = dict[StepPart, Sites]
"""A phase's parts, in their order."""


@dataclass(frozen=True)
class Shape:
    """One micro-batch: rows of equal length."""

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
    device: PlannedDevice
    vocab_size: int | None = None
    packed: bool = False
    documents: int = 1
    """Documents of a row."""
    policy: Policy = "recompute"
    scratch_dir: str | None = None
    world_size: int = 1
    """Ranks of the run: with several the optimizer does not step inside backward."""


class Built:
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
        )
        self.module: LossModule = self.fake.module
        self.optimizer: Optimizer = build_optimizer(trainable(self.module.model), subject.train)
        apply_activation_checkpointing(self.module.model, subject.policy, scratch_dir=subject.scratch_dir)
        self._updates: dict[bool, Sites] = {}
        self._micro_batches: dict[Shape, Sites] = {}

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
            micro_batch = without(micro_batch, OPTIMIZER, self.state_bytes())
        return {"micro_batch": micro_batch, "update": self._update(first)}

    def state_bytes(self) -> int:
        """Optimizer state once there is one."""
        with planning_for(self.subject.device), self.mode:
            self._have_state()
        return sum(tensor.untyped_storage().nbytes() for tensor in optimizer_tensors(self.optimizer))

    def _micro_batch(self, shape: Shape) -> Sites:
        """Forward and backward of one micro-batch of a later step; with accumulation, of the second of a window, which
        finds gradients (a third is like it)."""
        if shape not in self._micro_batches:
            with planning_for(self.subject.device, targets=shape.targets), self.mode:
                self._have_state()
                self.module.train()
                if self.subject.train.gradient_accumulation_steps > 1:
                    self._have_gradients()
                meter = SiteMeter(self.module, self.optimizer, detail=True)
                with meter:
                    loss_sum, count = self.module(self._batch(shape))
                    (loss_sum * 0.5).backward()
                    torch.stack([loss_sum.detach().double(), count.double()])
                del loss_sum, count
                self.optimizer.zero_grad(set_to_none=True)
            self._micro_batches[shape] = rest_without_gradients(meter.outcome())
        return self._micro_batches[shape]

    def _update(self, first: bool) -> Sites:
        """Norm, clipping and optimizer, with all gradients there."""
        if first not in self._updates:
            train = self.subject.train
            with planning_for(self.subject.device), self.mode:
                if first:
                    self.optimizer.state.clear()
                else:
                    self._have_state()
                self._have_gradients()
                meter = SiteMeter(self.module, self.optimizer, detail=True)
                with meter:
                    parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
                    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
                    if train.max_grad_norm > 0:
                        torch.nn.utils.clip_grads_with_norm_(parameters, train.max_grad_norm, norm)
                    self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            self._updates[first] = meter.outcome()
        return self._updates[first]

    def _evaluation(self, shape: Shape) -> Sites:
        """One batch of `frugal.training.evaluate.evaluate_rows`."""
        with planning_for(self.subject.device, targets=shape.targets), self.mode, torch.no_grad():
            self._have_state()
            self.module.eval()
            meter = SiteMeter(self.module, self.optimizer, detail=True)
            with meter:
                loss_sum, count = self.module(self._batch(shape))
                torch.stack([loss_sum.double(), count.double()])
        return meter.outcome()

    def _step_in_backward(self, shape: Shape, first: bool) -> Sites:
        with planning_for(self.subject.device, targets=shape.targets), self.mode:
            if first:
                self.optimizer.state.clear()
            else:
                self._have_state()
            self.module.train()
            meter = SiteMeter(self.module, self.optimizer, detail=True)
            with meter:
                loss_sum, _ = self.module(self._batch(shape))
                with OptimizerInBackward(self.optimizer, gradient_accumulation_steps=1, max_grad_norm=0.0):
                    (loss_sum * 0.5).backward()
            return meter.outcome()

    def _steps_in_backward(self) -> bool:
        train = self.subject.train
        place = place_of_step(
            self.subject.memory.optimizer_in_backward,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            max_grad_norm=train.max_grad_norm,
            loss_scaling=self.subject.compute is torch.float16,
            world_size=self.subject.world_size,
        )
        return place.in_backward

    def _have_gradients(self) -> None:
        for parameter in trainable(self.module.model).values():
            parameter.grad = torch.empty_like(parameter)

    def _have_state(self) -> None:
        """Optimizer state as after a first step, without running one."""
        if not self.optimizer.state:
            self._have_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _batch(self, shape: Shape) -> dict[str, Any]:
        """A batch as `frugal.data.collate` makes it, without values."""
        size = (1, shape.tokens) if self.fake.flat else (shape.rows, shape.length)
        ids = torch.zeros(size, dtype=torch.int64, device=self.kind)
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": torch.zeros_like(ids),
            "position_ids": torch.zeros_like(ids),
        }
        if not self.fake.flat:
            batch["attention_mask"] = torch.ones_like(ids)
            return batch
        documents = self.subject.documents
        size_each = shape.length // documents
        starts = [r * shape.length + d * size_each for r in range(shape.rows) for d in range(documents)]
        offsets = [*starts, shape.tokens]
        batch.update(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=size_each, max_length_k=size_each)
        return batch
