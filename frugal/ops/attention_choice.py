"""Rows of the table for attention: what each implementation cannot do, and when another is preferred.

From compute capability 8.0 on: for a single document without window or soft cap scaled_dot_product_attention, whose
flash kernel is given a few heads at a time in backward; else flash-attn when the user installed it (its kernels are
tuned on GPUs, ours were compiled and interpreted only); our packed kernel otherwise, because several documents are one
launch. Below 8.0, where Triton has no tensor cores: scaled_dot_product_attention's memory-efficient kernel, document by
document. These are rules, not measurements; `benchmarks/gpu.py` measures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from frugal.ops.attention import flash_attn
from frugal.ops.target import Target, attention_size_refusal, no_tensor_cores, no_triton

Facts = Mapping[str, Any]
FLASH_MAX_HEAD_SIZE = 256
FLASH_DTYPES = (torch.float16, torch.bfloat16)


def triton_refusal(facts: Facts) -> str | None:
    """What our packed kernels cannot do."""
    target, dtype = facts["target"], facts["dtype"]
    size = facts.get("head_size") or 0
    return attention_size_refusal(size, dtype) or no_triton(target, dtype) or no_tensor_cores(target)


def triton_yields(facts: Facts) -> str | None:
    """When ours could run but another is preferred."""
    plain = facts.get("window") is None and facts.get("softcap") is None
    if facts.get("documents") == 1 and plain and sdpa_refusal(facts) is None:
        return "one document without window or cap: scaled_dot_product_attention is one launch too, of a tuned kernel"
    return None


def flash_attn_yields(facts: Facts) -> str | None:
    """When flash-attn could run but torch's own copy of it is preferred."""
    plain = facts.get("window") is None and facts.get("softcap") is None
    if facts.get("documents") == 1 and plain and sdpa_refusal(facts) is None:
        return "one document without window or cap: torch's flash kernel is the same, and takes a few heads at a time"
    return None


def sdpa_refusal(facts: Facts) -> str | None:
    """What scaled_dot_product_attention cannot do without an [S, S] mask or [S, S] scores."""
    if facts.get("softcap") is not None:
        return "scaled_dot_product_attention has no soft cap"
    if facts.get("window") is not None:
        return "scaled_dot_product_attention has no window without an [S, S] mask"
    size = facts.get("head_size")
    if facts["target"].kind == "cuda" and size and size * facts["dtype"].itemsize % 16:
        return f"head size {size}: CUDA backends without [S, S] scores need heads of a multiple of 16 bytes"
    return None


def flash_attn_refusal(facts: Facts) -> str | None:
    """What flash-attn cannot do."""
    target: Target = facts["target"]
    size = facts.get("head_size") or 0
    if target.amd:
        return "not supported on ROCm: never tried"
    if target.capability is None:
        return "no CUDA device here whose compute capability could be asked for"
    if target.older_than((8, 0)):
        return f"flash-attn 2 needs compute capability 8.0, this is {target.label}"
    if size > FLASH_MAX_HEAD_SIZE or size % 8:
        return f"head size {size}: flash-attn takes multiples of 8 up to {FLASH_MAX_HEAD_SIZE}"
    return flash_attn_missing()


@functools.cache
def flash_attn_missing() -> str | None:
    """Why the package cannot be used; None when it can."""
    function, reason = flash_attn.load()
    return None if function is not None else reason
