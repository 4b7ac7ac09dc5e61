"""Whether a module may take another's place: both are run on the same random input, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PROOF_TOKENS = 5
Call = Callable[[nn.Module, Tensor], Tensor]
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)


def _plainly(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


def disproof(
    old: nn.Module, new: nn.Module, width: int, dtype: torch.dtype, *, call: Call = _plainly, scale: float = 1.0
) -> str | None:
    """Why ``new`` must not replace ``old``; None when output and all gradients agree.

    Input is [1, tokens, width] of standard deviation ``scale``; ``call`` runs a module on it. Tolerance, relative to
    the largest value of each tensor: 1e-5 in fp32, 2e-2 in 16 bits. Dropout is off meanwhile, and adapters whose B is
    still zero get a random B for the time of the comparison (else A's gradient would be zero and prove nothing).
    """
    device = next(old.parameters()).device
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(1, PROOF_TOKENS, width, generator=generator)).to(device, dtype)
    with _quiet((old, new)), _stirred(old, generator):
        try:
            want = _outcome(old, x, call)
        except _CANNOT_RUN as failure:
            return f"the stock module could not be run for comparison: {failure}"
        try:
            got = _outcome(new, x, call)
        except _CANNOT_RUN as failure:
            return f"the replacement does not fit it: {failure}"
    return difference(want, got, tolerance(dtype))


def tolerance(dtype: torch.dtype) -> float:
    """Allowed difference relative to the largest value."""
    return 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2


def difference(want: dict[str, Tensor], got: dict[str, Tensor], allowed: float) -> str | None:
    """The first of the named tensors that differs by more than ``allowed`` times its largest value."""
    for name, value in want.items():
        other = got.get(name)
        if other is None or other.shape != value.shape or other.dtype != value.dtype:
            return f"{name}: other shape, dtype or no gradient at all"
        error = float((other.double() - value.double()).abs().max()) if value.numel() else 0.0
        largest = float(value.double().abs().max()) if value.numel() else 0.0
        if not error <= allowed * max(largest, 1e-6):
            return f"{name} differs by {error:.2g} (largest value {largest:.2g})"
    return None


def _outcome(module: nn.Module, x: Tensor, call: Call) -> dict[str, Tensor]:
    """Output, and gradients of the input and of every trained parameter, for a fixed random upstream gradient."""
    x = x.clone().requires_grad_()
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        y = call(module, x)
        up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
        grads = torch.autograd.grad(y, [x, *trained.values()], up, allow_unused=True)
    named = zip(("gradient of the input", *(f"gradient of {n}" for n in trained)), grads, strict=True)
    return {"output": y.detach(), **{n: g for n, g in named if g is not None}}


@contextmanager
def _quiet(modules: tuple[nn.Module, ...]) -> Iterator[None]:
    """Evaluation mode for a while, each module's own mode afterwards."""
    modes = {m: m.training for module in modules for m in module.modules()}
    try:
        for m in modes:
            m.training = False
        yield
    finally:
        for m, training in modes.items():
            m.training = training


@contextmanager
def _stirred(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Random B where B is all zero, put back bit for bit."""
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
