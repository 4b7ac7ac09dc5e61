"""The optimizer inside backward: each parameter is updated as soon as its gradient is complete, and the gradient freed.

At most one layer's adapter gradients then exist at a time. The numbers are those of a step after backward. It excludes
what needs all gradients at once: accumulation over micro-batches, clipping by global norm, loss scaling, and reduction
over ranks; each is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from frugal.errors import ConfigError, FrugalError, MemoryBudgetError
from frugal.memory.pressure import is_out_of_memory


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where the optimizer steps, and why there."""

    in_backward: bool
    reason: str

    @property
    def name(self) -> str:
        """For the manifest."""
        return "inside backward" if self.in_backward else "after backward"


def place_of_step(
    asked: Literal["auto", True, False],
    *,
    gradient_accumulation_steps: int,
    max_grad_norm: float,
    loss_scaling: bool = False,
    world_size: int = 1,
) -> StepPlace:
    """Decide for ``memory.optimizer_in_backward``. Raises ConfigError for True where it cannot be."""
    faults = _faults(gradient_accumulation_steps, max_grad_norm, loss_scaling, world_size)
    if asked is True:
        _refuse(faults)
        return StepPlace(True, "memory.optimizer_in_backward is true")
    if asked is False:
        return StepPlace(False, "memory.optimizer_in_backward is false")
    if faults:
        return StepPlace(False, "; ".join(got for got, _ in faults))
    return StepPlace(True, "nothing needs all gradients at once; each is freed as soon as it is used")


def _faults(steps: int, max_grad_norm: float, loss_scaling: bool, world_size: int) -> list[tuple[str, str]]:
    """What stands against it, with the way out."""
    found = [
        (steps != 1, f"train.gradient_accumulation_steps is {steps}", "set it to 1"),
        (max_grad_norm > 0, f"train.max_grad_norm is {max_grad_norm} (the norm of all gradients is needed first)",
         "set it to 0"),
        (loss_scaling, "float16 loss scaling is on (an overflow must be seen before any update)",
         "use bfloat16 or float32"),
        (world_size != 1, f"the run has {world_size} ranks (gradients must be reduced before any update)",
         "use one process"),
    ]  # fmt: skip
    return [(got, fix) for bad, got, fix in found if bad]


def _refuse(faults: list[tuple[str, str]]) -> None:
    if faults:
        told = "; ".join(f"{got}: {fix}" for got, fix in faults)
        raise ConfigError(f"memory.optimizer_in_backward: the optimizer cannot run inside backward because {told}")


class OptimizerInBackward:
    """Attaches an optimizer to its parameters' gradients::

        with OptimizerInBackward(optimizer, gradient_accumulation_steps=1, max_grad_norm=0.0):
            (loss_sum / n_tokens).backward()  # parameters are updated, every .grad is None

    The loss must be divided before backward. Learning rates are read from the optimizer's groups at each update, and
    its state stays where a step after backward would keep it, so saving and resuming know no difference. ``close``
    (or leaving the block) removes all hooks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        gradient_accumulation_steps: int,
        max_grad_norm: float,
        loss_scaling: bool = False,
        world_size: int = 1,
    ) -> None:
        _refuse(_faults(gradient_accumulation_steps, max_grad_norm, loss_scaling, world_size))
        self.optimizer = optimizer
        self.updates = 0
        """Parameters updated so far."""
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self._handles: list[Any] = []
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._groups[parameter] = group
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._update))

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients used so far, as `torch.nn.utils.get_total_norm` computes it."""
        norms = [self._norms[parameter] for parameter in self._groups if parameter in self._norms]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        # The optimizer steps over a group of this one parameter; its state is keyed by parameter and stays shared.
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [{**self._groups[parameter], "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None
        self.updates += 1

    def close(self) -> None:
        """Remove all hooks; the optimizer is an ordinary one again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> OptimizerInBackward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def step_in_backward(
    module: nn.Module, optimizer: Optimizer, batch: dict[str, Any], targets: int
) -> tuple[float, float]:
    """One whole optimizer step on one micro-batch of ``targets`` targets; returns its loss and gradient norm.

    ``module`` gives (sum of losses, number of targets).

    Raises:
        FrugalError: the loss is not finite (nothing was updated), or a gradient was not (parameters were).
        MemoryBudgetError: memory ran out after the first update, so that the step cannot be done again.
    """
    loss_sum, count = module(batch)
    if int(count) != targets:
        raise AssertionError(f"{int(count)} targets reached the loss, the rows hold {targets}")
    loss = float(loss_sum.detach().double()) / targets
    if not math.isfinite(loss):
        raise FrugalError(f"the loss is {loss}. Training stopped before using it. Lower train.learning_rate.")
    with OptimizerInBackward(optimizer, gradient_accumulation_steps=1, max_grad_norm=0.0) as attached:
        try:
            (loss_sum * (1 / targets)).backward()
        except Exception as error:
            if attached.updates and is_out_of_memory(error):
                raise MemoryBudgetError(
                    f"out of memory inside backward, after {attached.updates} parameters of the step were updated: "
                    f"{error}. Go on from the last checkpoint with memory.optimizer_in_backward: false, which can "
                    "repeat such a step with less memory."
                ) from error
            raise
    norm = attached.grad_norm()
    if not math.isfinite(norm):
        raise FrugalError(
            f"the gradient norm is {norm} and the optimizer runs inside backward, so the weights in memory are "
            "spoilt. Nothing was saved of this step: lower train.learning_rate, or go on from the last checkpoint with "
            "memory.optimizer_in_backward: false, which stops before using such a gradient."
        )
    return loss, norm
