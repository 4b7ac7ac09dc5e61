"""What the training loop works on, what it knows between two steps, and what it calls around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from frugal.config import TrainSection
from frugal.data import TokenDataset
from frugal.distributed.strategy import Strategy
from frugal.memory.space import Shortage
from frugal.objectives import LossModule, Objective
from frugal.training.oom_fallback import MemorySettings
from frugal.training.schedule import StepOrder, TrainPlan
from frugal.training.signals import StopRequest
from frugal.training.step import OptimizerStep


@dataclass
class LoopState:
    """What a run knows between two steps, apart from tensors. Saved with every checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens read since the first step, over all ranks, padding left out."""
    seconds: float = 0.0
    """Time spent in steps, over all parts of a resumed run."""
    last_loss: float | None = None
    first_eval_loss: float | None = None
    """Loss on the evaluation rows before the first step."""
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0
    """Steps that fp16 loss scaling left out because a gradient overflowed."""
    loss_scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainSetup:
    """Everything that the loop works on."""

    module: LossModule
    wrapped: nn.Module
    """``module`` as the strategy trains it; both are what `Strategy.prepare` took and gave."""
    strategy: Strategy
    optimizer: Optimizer
    plan: TrainPlan
    order: StepOrder
    train: TrainSection
    rows: TokenDataset
    eval_rows: TokenDataset | None
    device: torch.device
    lr_lambda: Callable[[int], float]
    """Factor on the learning rate of a step (0-based)."""
    memory: MemorySettings
    """How much of a step exists at a time; changed when memory runs out."""
    save_steps: int | None = None
    keep_best: bool = False
    """Save whenever an evaluation was the best so far."""
    loss_scaling: bool = False
    step_in_backward: bool = False
    """Update each parameter inside backward where a step is one micro-batch; see `frugal.training.step`."""

    @property
    def objective(self) -> Objective:
        """What is trained for."""
        return self.module.objective

    def optimizer_step(self, *, loss_scaling: bool) -> OptimizerStep:
        """The step of this run, with a gradient scaler of its own."""
        return OptimizerStep(
            self.wrapped,
            self.optimizer,
            self.strategy,
            max_grad_norm=self.train.max_grad_norm,
            loss_scaling=loss_scaling,
        )


@dataclass
class Hooks:
    """What happens around steps; run.py supplies it."""

    record: Callable[[dict[str, Any]], None]
    """Called with every record of train_log.jsonl."""
    save: Callable[[LoopState], None]
    """Writes a checkpoint; called by every rank."""
    stop: StopRequest
    out_of_memory: Callable[[Shortage], None] | None = None
    """Makes the run need less, or raises; then the same step is done again."""


# ---- random generators that dropout draws from -----------------------------------------------------------------------


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Generator states as uint8 tensors: `cpu`, and `cuda` when the run is on a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put states from `rng_state` back. A GPU state is ignored on a machine that trains on the CPU."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def seed_step_noise(seed: int, rank: int) -> None:
    """Seed dropout at the start of a run; ranks draw different noise, adapters were made before from one seed."""
    torch.manual_seed(seed + 1_000_003 * rank)
