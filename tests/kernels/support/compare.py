"""The tolerance rule: measured against float64, a kernel may err as much as the naive computation in its dtype."""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
_SLACK = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 4.0}


def close_to_exact(got: Tensor, exact: Tensor, naive: Tensor | None = None, *, slack: float | None = None) -> None:
    """Fail unless ``got`` is as near to ``exact`` (float64) as ``naive`` (same inputs, plain torch, got's dtype) is.

    The largest and the root-mean-square error count, each against the naive error plus ``slack`` roundings of the
    output's dtype: unless given, one for 16-bit outputs (computed in float32, rounded once) and four for float32.
    Without ``naive`` the roundings alone are allowed. NaN (poison) anywhere fails.
    """
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert exact.dtype == torch.float64
    wide = got.double()
    assert torch.isfinite(wide).all(), f"{int((~torch.isfinite(wide)).sum())} of {wide.numel()} values are not finite"
    if not wide.numel():
        return
    error = (wide - exact).abs()
    rounding = (slack or _SLACK[got.dtype]) * _EPS[got.dtype]
    naive_error = torch.zeros_like(error) if naive is None else (naive.double() - exact).abs()
    assert got.dtype == (got if naive is None else naive).dtype
    # Largest: each value against its own size, but cancellation costs a share of the tensor's typical size.
    typical = exact.abs().mean()
    allowed = naive_error.max() + rounding * torch.maximum(exact.abs(), typical)
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (
        f"error {error.flatten()[worst]:.3e} at {int(worst)} (value {exact.flatten()[worst]:.6g}), allowed "
        f"{allowed.flatten()[worst]:.3e}"
    )
    rms, naive_rms = error.square().mean().sqrt(), naive_error.square().mean().sqrt()
    bound = 1.1 * naive_rms + rounding * exact.square().mean().sqrt()
    assert rms <= bound, f"root-mean-square error {rms:.3e}, allowed {bound:.3e}"


def bits_equal(got: Tensor, expected: Tensor) -> None:
    """Fail unless both have the same dtype, shape and bits."""
    assert got.dtype == expected.dtype, f"{got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{tuple(got.shape)}, expected {tuple(expected.shape)}"
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    different = got.contiguous().view(as_int) != expected.contiguous().view(as_int)
    assert not different.any(), (
        f"{int(different.sum())} of {different.numel()} values differ, first at "
        f"{different.flatten().nonzero()[0].item()}: {got[different][:3].tolist()}, expected "
        f"{expected[different][:3].tolist()}"
    )
