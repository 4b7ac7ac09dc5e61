"""When a number is right: measured against float64, an implementation may err about as much as the plain computation.

The largest error of one draw says little: two sound ways to compute attention on random numbers differ in it by a
factor of three, and the CPU's instruction set decides which is ahead. So several draws are judged as one, and by their
root mean square, whose ratio is steady. The largest error has a wider allowance; it is there for single wrong values,
which hardly move a mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Values = Sequence[Tensor]
Random = Callable[..., Tensor]
"""Normal numbers of the shape given."""
Results = tuple[Values, Values, Values]
"""Several tensors of one draw: as computed, in float64, and computed plainly in the same dtype."""
DRAWS = 4
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
SLACK = {torch.float16: 8.0, torch.bfloat16: 8.0, torch.float32: 64.0}  # roundings of a single value besides
MEAN_SLACK = 4.0  # roundings of the root mean square besides


@dataclass(frozen=True)
class Check:
    """One comparison that was run on this machine."""

    op: str
    implementation: str
    what: str
    passed: bool
    error: float | None
    """Largest error of all results, as a part of what is allowed: right up to 1. None: it failed to run."""
    seconds: float
    where: str
    """"run on this GPU" or "run on this CPU"."""
    message: str = ""
    """What it raised."""
    tolerance: float | None = None
    """The error allowed, where it is one number: what was measured is ``error`` times it."""
    advice: str = ""
    """What to do when it is wrong."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def share_of_allowed(got: Tensor, exact: Tensor, naive: Tensor) -> float:
    """Error of ``got`` against ``exact`` (float64), divided by the error allowed; infinite where anything is no number.

    Of the errors of ``naive`` (plain torch, same inputs and dtype) twice the root mean square is allowed, and four
    times the largest for a single value; besides, a few roundings of the value, or of a typical one where terms cancel.
    """
    if got.shape != exact.shape or not all(bool(torch.isfinite(t).all()) for t in (got, exact, naive)):
        return float("inf")
    got, naive = got.detach(), naive.detach()
    rounding, least = _ROUNDING[got.dtype], torch.finfo(torch.float64).tiny
    error, plain = (got.double() - exact).abs(), (naive.double() - exact).abs()
    typical = torch.maximum(exact.abs(), exact.abs().mean())
    single = (error / (4 * plain.max() + SLACK[got.dtype] * rounding * typical + least)).max()
    mean = _rms(error) / (2 * _rms(plain) + MEAN_SLACK * rounding * _rms(exact) + least)
    return float(torch.maximum(single, mean))


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def judged(
    op: str, implementation: str, what: str, where: str, device: torch.device, compute: Callable[[], float]
) -> Check:
    """Run ``compute``, which returns a share of the allowed error, and time it. Whatever it raises is a finding."""
    start = time.perf_counter()
    try:
        error = compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as failure:
        text = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        return Check(op, implementation, what, False, None, time.perf_counter() - start, where, text[:300])
    return Check(op, implementation, what, error <= 1.0, error, time.perf_counter() - start, where)


def worst(got: Values, exact: Values, naive: Values) -> float:
    """The largest `share_of_allowed` of several results."""
    return max(share_of_allowed(g, e, n) for g, e, n in zip(got, exact, naive, strict=True))


def drawn(compute: Callable[[], Results]) -> Callable[[], float]:
    """A check of `DRAWS` calls of ``compute``, each with random numbers of its own, taken together as if one."""

    def share() -> float:
        draws = [compute() for _ in range(DRAWS)]
        got, exact, naive = (
            [torch.stack(same) for same in zip(*side, strict=True)] for side in zip(*draws, strict=True)
        )
        return worst(got, exact, naive)

    return share


def with_gradients(function: Callable[..., Tensor], inputs: Values, grad: Tensor | None = None) -> list[Tensor]:
    """The result of ``function`` and the gradients of its inputs under the upstream ``grad`` (None: ones)."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    upstream = torch.ones_like(out) if grad is None else grad.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


Need = Literal["model", "rows", "run"]
"""What a check may need besides this machine."""


@dataclass(frozen=True)
class Subject:
    """What is checked: an operation's numbers on ``device`` in ``dtype``, and later the user's own model or run."""

    device: torch.device
    dtype: torch.dtype
    has: frozenset[Need] = frozenset()
    """What there is besides this machine."""
    work: Any = None
    """The model, rows or run (`model_checks.Work`)."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def random(self, *shape: int) -> Tensor:
        """Normal numbers of ``shape``, drawn on the CPU so that every device gets the same."""
        return torch.randn(*shape, generator=self.generator).to(device=self.device, dtype=self.dtype)

    @property
    def where(self) -> str:
        """For `Check.where`."""
        return "run on this GPU" if self.device.type == "cuda" else "run on this CPU"


@dataclass(frozen=True)
class Measurement:
    """One comparison of a check, not run yet."""

    op: str
    implementation: str
    what: str
    error: Callable[[], float]
    """The largest error as a part of what is allowed; right up to 1."""
    tolerance: float | None = None
    advice: str = ""
