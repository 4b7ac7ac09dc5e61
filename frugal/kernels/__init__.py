"""Triton kernels. Importing this package needs no Triton; importing its modules does: ask `why_not` first."""

from __future__ import annotations

import importlib.util


def why_not() -> str | None:
    """Why no kernel can be used in this environment whatever the device; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton; wheels exist for Linux on x86-64)"
    return None
