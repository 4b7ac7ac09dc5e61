"""Triton kernels. Importing this package needs no Triton; importing its modules does: ask `why_not` first."""

from __future__ import annotations

import importlib.util

import torch

# What benchmarks/kernels_aot.py compiles; attention, which is built on tensor cores, from the second on.
COMPILED_FOR = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MAX_NORM_COLUMNS = 8192  # of RMSNorm: a row lives in registers, and longer ones spill in backward
MAX_HEAD_SIZE = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}  # of attention


def why_not() -> str | None:
    """Why no kernel can be used in this environment whatever the device; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton; wheels exist for Linux on x86-64)"
    return None


def attention_size_refusal(head_size: int, dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot serve a head size or dtype; None when they can."""
    if dtype not in MAX_HEAD_SIZE:
        return f"dtype {dtype}: the attention kernels take float16, bfloat16 and float32"
    if head_size > MAX_HEAD_SIZE[dtype]:
        return f"head size {head_size} in {dtype}: tiles of more than {MAX_HEAD_SIZE[dtype]} columns do not fit a GPU"
    return None
