"""Whether a base can be computed in float16 at all: one real row goes through it before training.

float16 ends at 65,504. Some families have activations beyond that in a few layers and tokens; then every loss is
nan, and the proofs of attention and head, which see nan too, would quietly keep what needs more memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from frugal.distributed.strategy import Strategy
from frugal.errors import UnsupportedError
from frugal.model_structure import decoder_layers
from frugal.objectives.base import Batch


@torch.no_grad()
def refuse_overflow(strategy: Strategy, wrapped: nn.Module, model: nn.Module, batch: Batch) -> None:
    """Raise UnsupportedError, naming the first module of ``model`` whose output is not finite for ``batch``.

    ``wrapped`` computes the loss of a batch, as `Strategy.prepare` gave it. Every rank calls this at the same time.
    """
    found: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(value, Tensor) and value.is_floating_point():
                found.append((name, torch.isfinite(value).all()))

        return look

    layers = decoder_layers(model)
    handles = [
        module.register_forward_hook(watch(f"{layer}.{name}".rstrip(".")))
        for layer, parts in layers.items()
        for name, module in parts.named_modules()
    ]
    was_training = wrapped.training
    wrapped.eval()
    try:
        loss, _ = wrapped(batch)
    finally:
        for handle in handles:
            handle.remove()
        wrapped.train(was_training)
        strategy.rest(wrapped)
    first = next((name for name, finite in found if not bool(finite)), None)
    if first is None and bool(torch.isfinite(loss)):
        return
    where = "the head (its logits)" if first is None else first.removeprefix("base_model.model.")
    raise UnsupportedError(
        f"model.dtype: this base cannot be computed in float16: in the first row that is to be trained, {where} gives "
        "values beyond 65,504, so every loss would be nan. Write `model.dtype: float32` (slower; works with "
        "model.quantize: nf4), or use a GPU that has bfloat16 (compute capability 8.0 and later)."
    )
