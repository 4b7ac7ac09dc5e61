"""The optimizer inside backward: each parameter is updated as soon as its gradient is complete, and the gradient freed.

At most one layer's adapter gradients then exist at a time. The numbers are those of a step after backward. It excludes
what needs all gradients at once: accumulation over micro-batches, clipping by global norm, loss scaling, and reduction
over ranks; each is refused by name.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from frugal.errors import ConfigError


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
        refused = [
            (gradient_accumulation_steps != 1, f"train.gradient_accumulation_steps is {gradient_accumulation_steps}",
             "set it to 1"),
            (max_grad_norm > 0, f"train.max_grad_norm is {max_grad_norm} (the norm of all gradients is needed first)",
             "set it to 0"),
            (loss_scaling, "float16 loss scaling is on (an overflow must be seen before any update)",
             "use bfloat16 or float32"),
            (world_size != 1, f"the run has {world_size} ranks (gradients must be reduced before any update)",
             "use one process"),
        ]  # fmt: skip
        faults = [f"{got}: {fix}" for bad, got, fix in refused if bad]
        if faults:
            raise ConfigError("the optimizer cannot run inside backward because " + "; ".join(faults))
        self.optimizer = optimizer
        self.updates = 0
        """Parameters updated so far."""
        self._handles: list[Any] = []
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._groups[parameter] = group
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._update))

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor) -> None:
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
