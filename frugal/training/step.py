"""One optimizer step: forward, backward, norm, clipping, update. The only code that trains.

The loop runs it on rows, the warm-up step on the longest micro-batch, the planner on tensors without memory. A step is
`forward_backward` over the micro-batches of a rank, then `update`; where nothing needs all gradients at once,
`forward_backward_update` does both, each parameter updated as soon as its gradient is complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frugal.decision import Decision
from frugal.distributed.optimizer_state import named_parameters
from frugal.distributed.strategy import Strategy
from frugal.errors import ConfigError, FrugalError, MemoryBudgetError
from frugal.memory.space import is_out_of_memory
from frugal.objectives.base import Batch


class OptimizerStep:
    """One optimizer step over a module, its optimizer and the strategy that prepared both."""

    def __init__(
        self,
        wrapped: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        *,
        max_grad_norm: float,
        loss_scaling: bool = False,
    ) -> None:
        """``wrapped`` gives `Objective.loss`'s pair for a batch. ``loss_scaling``: as float16 needs."""
        self.wrapped, self.optimizer, self.strategy = wrapped, optimizer, strategy
        self.max_grad_norm = max_grad_norm
        self.scaler = torch.amp.GradScaler(strategy.device.type, enabled=loss_scaling)

    def forward_backward(self, micro_batches: Iterable[Batch], count: int, targets: int) -> Tensor:
        """Add up the gradients of ``count`` micro-batches' loss, a mean over the ``targets`` of all ranks.

        Returns the objective's sums over this rank's micro-batches, float64, on the device: nothing is read here.
        """
        # gradients are averaged over ranks, the loss is a sum over them: the factor undoes the average
        factor = self.strategy.world_size / targets
        totals: Tensor | None = None
        for index, batch in enumerate(micro_batches, start=1):
            # gradients are reduced once, in the backward pass of the last micro-batch
            with self.strategy.accumulating(self.wrapped, index == count):
                loss_sum, sums = self.wrapped(batch)
                self.strategy.backward(loss_sum * factor, self.scaler)
            totals = sums if totals is None else totals + sums
            del batch, loss_sum, sums
        if totals is None:
            raise ValueError("a step needs at least one micro-batch")
        return totals

    def update(self, loss: float | None = None, *, name: str = "step", rows: Sequence[int] = ()) -> float:
        """Clip the gradients, update the parameters and drop the gradients; returns the norm before clipping.

        ``loss``: of the step, to be checked before anything is changed (None: what is computed does not matter); an
        error then tells ``name`` and ``rows``.

        Raises:
            FrugalError: loss or norm is not finite; parameters are as before (loss scaling skips such a step itself).
        """
        norm = self.strategy.norm_and_clip(self.optimizer, self.max_grad_norm, self.scaler)
        finite = loss is None or (math.isfinite(loss) and (math.isfinite(norm) or self.scaler.is_enabled()))
        if not finite:
            self.strategy.zero_grad(self.optimizer)
            raise FrugalError(
                f"{name}: the loss is {loss} and the gradient norm {norm}. Training stopped before using them; the "
                f"rows of that step are {list(rows[:8])}. {self._advice()}"
            )
        self.strategy.step(self.optimizer, self.scaler)
        self.strategy.zero_grad(self.optimizer)
        return norm

    def forward_backward_update(self, batch: Batch, targets: int, *, name: str = "step") -> tuple[Tensor, float]:
        """The whole step on one micro-batch of ``targets`` targets, updates inside backward; sums and gradient norm.

        Raises:
            FrugalError: the loss is not finite (nothing was updated), or a gradient was not (parameters were).
            MemoryBudgetError: memory ran out after the first update, so that the step cannot be repeated.
        """
        loss_sum, sums = self.wrapped(batch)
        loss = float(sums[0]) / targets
        if not math.isfinite(loss):
            raise FrugalError(f"{name}: the loss is {loss}. Training stopped before using it. {self._advice()}")
        with OptimizerInBackward(
            self.optimizer, gradient_accumulation_steps=1, max_grad_norm=0.0, loss_scaling=self.scaler.is_enabled()
        ) as attached:
            try:
                self.strategy.backward(loss_sum * (1 / targets), self.scaler)
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
                f"{name}: the gradient norm is {norm} and the optimizer runs inside backward, so the weights in memory "
                "are spoilt. Nothing was saved of this step: lower train.learning_rate, or go on from the last "
                "checkpoint with memory.optimizer_in_backward: false, which stops before using such a gradient."
            )
        return sums, norm

    def _advice(self) -> str:
        """What to do about a step that is not finite: before the first update no learning rate is to blame."""
        if self.optimizer.state or self.strategy.engine_steps:
            return "Lower train.learning_rate, or look at these rows."
        dtype = "write model.dtype: float32" if self.scaler.is_enabled() else "look at model.dtype"
        return f"Nothing was updated yet, so the base itself gives it for these rows: look at them, and {dtype}."

    def put_gradients(self) -> None:
        """Gradients of 0, as an earlier micro-batch of the step would have left theirs."""
        for parameter in named_parameters(self.optimizer).values():
            parameter.grad = torch.zeros_like(parameter)

    def put_state(self) -> None:
        """Optimizer state as after a first step, where there is none yet; parameters may change.

        Not where an engine steps by itself.
        """
        if self.optimizer.state or self.strategy.engine_steps:
            return
        self.put_gradients()
        self.optimizer.step()
        self.strategy.zero_grad(self.optimizer)


# ---- the optimizer inside backward -----------------------------------------------------------------------------------


def optimizer_in_backward(
    asked: Literal["auto", True, False],
    *,
    gradient_accumulation_steps: int,
    max_grad_norm: float,
    loss_scaling: bool = False,
    world_size: int = 1,
) -> Decision[bool]:
    """Decide ``memory.optimizer_in_backward``. Raises ConfigError for True where it cannot be.

    It excludes what needs all gradients at once: accumulation over micro-batches, clipping by global norm, loss
    scaling, and reduction over ranks.
    """
    key = "memory.optimizer_in_backward"
    obstacles = _obstacles(gradient_accumulation_steps, max_grad_norm, loss_scaling, world_size)
    if asked is True:
        _refuse(obstacles)
    if asked != "auto":
        return Decision(key, asked, f"{key} is {str(asked).lower()}")
    if obstacles:
        return Decision(key, False, "; ".join(found for found, _ in obstacles))
    return Decision(key, True, "nothing needs all gradients at once; each is freed as soon as it is used")


def _obstacles(steps: int, max_grad_norm: float, loss_scaling: bool, world_size: int) -> list[tuple[str, str]]:
    """What excludes updates inside backward, with the way out."""
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


def _refuse(obstacles: list[tuple[str, str]]) -> None:
    if obstacles:
        told = "; ".join(f"{got}: {fix}" for got, fix in obstacles)
        raise ConfigError(f"memory.optimizer_in_backward: the optimizer cannot run inside backward because {told}")


class OptimizerInBackward:
    """Updates each parameter as soon as its gradient is complete, and frees the gradient::

        with OptimizerInBackward(optimizer, gradient_accumulation_steps=1, max_grad_norm=0.0):
            (loss_sum / n_tokens).backward()  # parameters are updated, every .grad is None

    At most one layer's adapter gradients exist at a time, and the numbers are those of a step after backward. The loss
    must be divided before backward. Learning rates are read from the optimizer's groups at each update, and its state
    stays where a step after backward would keep it, so saving and resuming know no difference. ``close`` (or leaving
    the block) removes all hooks.
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
        _refuse(_obstacles(gradient_accumulation_steps, max_grad_norm, loss_scaling, world_size))
        self.optimizer = optimizer
        self.updates = 0
        """Parameters updated so far."""
        self._norms: dict[Tensor, Tensor] = {}
        self._handles: list[Any] = []
        self._groups: dict[Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._groups[parameter] = group
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._update))

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients used so far, as `torch.nn.utils.get_total_norm` computes it."""
        norms = [self._norms[parameter] for parameter in self._groups if parameter in self._norms]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
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
