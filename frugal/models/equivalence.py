"""Equivalence checks: whether a module, or a whole model, computes the same after something was replaced in it.

One tolerance rule, one probe and one way to evaluation mode and back for all of them: a module that may take another's
place (`mismatch`), attention of a whole model and its head (`frugal.models.attention`, `frugal.models.head`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from frugal.model_structure import input_device

PROOF_TOKENS = 5
"""Tokens that a single module is compared on."""
PROBE_ROWS = 2
PROBE_TOKENS = 13
"""Tokens of each row that a whole model is compared on."""
_PADDED = 4  # tokens at the end of the last row
Call = Callable[[nn.Module, Tensor], Tensor]
DOES_NOT_FIT = "the replacement does not fit it: "
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)


def tolerance(dtype: torch.dtype, *, whole_model: bool = False) -> float:
    """Allowed difference relative to the largest value: 1e-5 in fp32 and 2e-2 in 16 bits for one module.

    Through a whole model, whose layers add up their roundings, 1e-4 and 3e-2.
    """
    if dtype in (torch.float32, torch.float64):
        return 1e-4 if whole_model else 1e-5
    return 3e-2 if whole_model else 2e-2


def model_tolerance(model: Any) -> float:
    """`tolerance` of a whole model, by the dtype of its embedding table."""
    return tolerance(model.get_input_embeddings().weight.dtype, whole_model=True)


def largest_difference(want: Tensor, got: Tensor) -> tuple[float, float]:
    """Largest absolute difference, and largest absolute value of ``want``."""
    if not want.numel():
        return 0.0, 0.0
    wide = torch.promote_types(want.dtype, torch.float32)
    return float((got.to(wide) - want.to(wide)).abs().max()), float(want.abs().max())


def difference(want: dict[str, Tensor], got: dict[str, Tensor], allowed: float) -> str | None:
    """The first of the named tensors that differs by more than ``allowed`` times its largest value."""
    for name, value in want.items():
        other = got.get(name)
        if other is None or other.shape != value.shape or other.dtype != value.dtype:
            return f"{name}: other shape, dtype or no gradient at all"
        error, largest = largest_difference(value, other)
        if not error <= allowed * max(largest, 1e-6):
            return f"{name} differs by {error:.2g} (largest value {largest:.2g})"
    return None


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while, each module's own mode afterwards."""
    modes = {m: m.training for module in modules for m in module.modules()}
    try:
        for m in modes:
            m.training = False
        yield
    finally:
        for m, training in modes.items():
            m.training = training


@torch.no_grad()
def probe(model: Any, *runs: Callable[..., Tensor], tokens: int = PROBE_TOKENS) -> list[Tensor]:
    """What each of ``runs`` gives for two short random rows, the second padded at its end, in evaluation mode.

    A run takes a model's keywords and returns [rows, tokens, size]; its tokens that are no padding come back,
    [tokens, size].
    """
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (PROBE_ROWS, tokens), generator=generator).to(input_device(model))
    mask = torch.ones_like(ids)
    mask[-1, -_PADDED:] = 0
    with evaluating(model):
        return [run(input_ids=ids, attention_mask=mask, use_cache=False)[mask.bool()] for run in runs]


def mismatch(
    old: nn.Module, new: nn.Module, width: int, dtype: torch.dtype, *, call: Call | None = None, scale: float = 1.0
) -> str | None:
    """Why ``new`` must not replace ``old``; None when output and all gradients agree.

    Input is [1, tokens, width] of standard deviation ``scale``; ``call`` runs a module on it. Dropout is off meanwhile,
    and adapters whose B is still zero get a random B for the time of the comparison (else A's gradient would be zero
    and prove nothing).
    """
    device = next(old.parameters()).device
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(1, PROOF_TOKENS, width, generator=generator)).to(device, dtype)
    with evaluating(old, new), _random_b(old, generator):
        try:
            want = _outcome(old, x, call)
        except CANNOT_RUN as failure:
            return f"the stock module could not be run for comparison: {failure}"
        try:
            got = _outcome(new, x, call)
        except CANNOT_RUN as failure:
            return f"{DOES_NOT_FIT}{failure}"
    return difference(want, got, tolerance(dtype))


def _outcome(module: nn.Module, x: Tensor, call: Call | None) -> dict[str, Tensor]:
    """Output, and gradients of the input and of every trained parameter, for a fixed random upstream gradient."""
    x = x.clone().requires_grad_()
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        y: Tensor = module(x) if call is None else call(module, x)
        up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
        grads = torch.autograd.grad(y, [x, *trained.values()], up, allow_unused=True)
    named = zip(("gradient of the input", *(f"gradient of {n}" for n in trained)), grads, strict=True)
    return {"output": y.detach(), **{n: g for n, g in named if g is not None}}


@contextmanager
def _random_b(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Random B where B is all zero, zero again afterwards."""
    zero = [p for n, p in module.named_parameters() if ".lora_B." in f".{n}" and not bool(p.detach().any())]
    try:
        with torch.no_grad():
            for p in zero:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for p in zero:
                p.zero_()
