"""AdamW with block-wise 8-bit state (Dettmers et al. 2022, arXiv:2110.02861), in bitsandbytes' numbers.

Both moments are kept as one byte an element plus one fp32 scale for every 256 elements, coded by bitsandbytes' dynamic
map: 2.03 bytes a parameter instead of 8. The update is `frugal.ops.adam8bit`: frugal's kernel on GPUs that the table
gives it, else bitsandbytes' own operation; both write the same state. What differs from
`bitsandbytes.optim.AdamW8bit`: state is plain tensors and an int, loaded with the dtypes it was saved with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import bitsandbytes  # noqa: F401  (registers torch.ops.bitsandbytes)
import torch
from bitsandbytes.functional import create_dynamic_map
from torch.optim import Optimizer

from frugal.distributed.tensors import local
from frugal.errors import CheckpointError
from frugal.ops.adam8bit import adam8bit_

BLOCK_SIZE = 256
MIN_8BIT_SIZE = 4096
"""Smaller tensors keep fp32 state, as in bitsandbytes."""

# Made at import: the maps are lists of numbers, so that they can be put on any device and be fake under a fake mode.
_SIGNED_MAP: list[float] = create_dynamic_map(signed=True).tolist()
_UNSIGNED_MAP: list[float] = create_dynamic_map(signed=False).tolist()

_DTYPES = {
    8: {"state1": torch.uint8, "state2": torch.uint8, "absmax1": torch.float32, "absmax2": torch.float32},
    32: {"state1": torch.float32, "state2": torch.float32},
}


class AdamW8bit(Optimizer):
    """AdamW whose moments take one byte an element.

    State of a parameter: `step` (int), `state1` and `state2` (first and second moment; uint8 [shape], or fp32 below
    ``MIN_8BIT_SIZE`` elements) and, for 8-bit ones, `absmax1` and `absmax2` (fp32 [ceil(elements / 256)]). Parameters
    may be fp32, bf16 or fp16; a gradient has its parameter's dtype. Weight decay is decoupled. Of a sharded parameter
    only this rank's shard is updated, with state of the shard's shape; whether that is 8-bit goes by the whole.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW8bit: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay} out of range")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._maps: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise TypeError("AdamW8bit takes no sparse gradients")
        state = self.state[parameter]
        if not state:
            self._start(parameter, state)
        state["step"] += 1
        values, grad = local(parameter.detach()), local(grad)
        if not values.numel():  # a shard without elements: fewer rows than ranks
            return
        flat = values if values.is_contiguous() else values.contiguous()
        beta1, beta2 = group["betas"]
        if state["state1"].dtype == torch.uint8:
            map1, map2 = self._dynamic_maps(parameter.device)
            adam8bit_(
                flat, grad.contiguous(), state["state1"], state["state2"], state["absmax1"], state["absmax2"], map1,
                map2, lr=group["lr"], betas=(beta1, beta2), eps=group["eps"], weight_decay=group["weight_decay"],
                step=state["step"],
            )  # fmt: skip
        else:
            torch.ops.bitsandbytes.optimizer_update_32bit(
                "adam", grad.contiguous(), flat, state["state1"], state["state2"], None, 0.0, 0.0, beta1, beta2, 0.0,
                0.0, group["eps"], group["weight_decay"], state["step"], group["lr"], 1.0, False,
            )  # fmt: skip
        if flat is not values:
            values.copy_(flat)

    @staticmethod
    def _start(parameter: torch.Tensor, state: dict[str, Any]) -> None:
        for key, (dtype, shape) in _layout(parameter).items():
            state[key] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        state["step"] = 0

    def _dynamic_maps(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The 256 values a byte stands for: signed for the first moment, unsigned for the second."""
        if device not in self._maps:
            self._maps[device] = (
                torch.tensor(_SIGNED_MAP, dtype=torch.float32, device=device),
                torch.tensor(_UNSIGNED_MAP, dtype=torch.float32, device=device),
            )
        return self._maps[device]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state with the dtypes it was saved with.

        torch's own method casts floating state to the parameter's dtype, which would ruin the scales of bf16 adapters.
        Raises CheckpointError for state of another optimizer or of other parameters.
        """
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved_groups]:
            raise CheckpointError("the saved optimizer state is of another number of parameters than this run has")
        parameters = [p for g in groups for p in g["params"]]
        indices = [i for g in saved_groups for i in g["params"]]
        loaded = {}
        for index, parameter in zip(indices, parameters, strict=True):
            if index in state_dict["state"]:
                loaded[parameter] = _checked(state_dict["state"][index], parameter, index)
        super().load_state_dict({"state": {}, "param_groups": saved_groups})
        self.state.update(loaded)


def _layout(parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    here = local(parameter.detach())
    blocks = -(-here.numel() // BLOCK_SIZE)
    kinds = _DTYPES[8 if parameter.numel() >= MIN_8BIT_SIZE else 32]
    return {k: (dtype, (blocks,) if k.startswith("absmax") else tuple(here.shape)) for k, dtype in kinds.items()}


def _checked(saved: dict[str, Any], parameter: torch.Tensor, index: int) -> dict[str, Any]:
    """A copy of one parameter's saved state on its device, bit for bit."""
    wanted = _layout(parameter)
    if set(saved) != {*wanted, "step"}:
        raise CheckpointError(
            f"the saved state of parameter {index} has the entries {sorted(saved)}: AdamW8bit keeps "
            f"{sorted([*wanted, 'step'])}. It is the state of another optimizer: set train.optim back."
        )
    out: dict[str, Any] = {"step": int(saved["step"])}
    for key, (dtype, shape) in wanted.items():
        tensor = saved[key]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"the saved {key} of parameter {index} is {tensor.dtype} {list(tensor.shape)}, "
                f"this run needs {dtype} {list(shape)}"
            )
        out[key] = tensor.to(parameter.device, copy=True)
    return out
