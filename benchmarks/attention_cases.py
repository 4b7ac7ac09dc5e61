"""Launches of the attention kernels at Llama-3.1-8B's and other families' shapes, for the compile matrix and the sweep.

`ATTENTION_CASES` has the form of `benchmarks.kernel_cases.CASES`. Attention is bound by arithmetic: its ideal bytes are
given (operands once, results once), not asserted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernel_cases import Case, Make, case
from frugal.ops.attention.triton import prepare_attention
from frugal.ops.attention.triton_backward import prepare_attention_dkdv, prepare_attention_dq
from frugal.ops.launch import Launch

# Kernels whose matrix has other dtypes than bf16, and forms that the timing has but the matrix leaves out.
FP16, FP32, TIMED_ONLY = ("d128",), ("d64", "d128"), ("d80", "d96", "d128_window", "d128_bidirectional", "d256")
KERNELS = ("attention", "attention_dq", "attention_dkdv")


@dataclass(frozen=True)
class Form:
    """Heads and masks of a model family."""

    size: int
    heads: int = 32
    kv_heads: int = 8
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    tokens: int = 8192


def operands(kernel: str, form: Form, dtype: torch.dtype, make: Make) -> tuple[list[Tensor], list[Tensor]]:
    """([read and written tensors in the plan's order], lse and delta), laid out as a model's projections write them."""
    q, d_out, out, dq = (make(1, form.tokens, form.heads, form.size, dtype=dtype).transpose(1, 2) for _ in range(4))
    k, v, dk, dv = (make(1, form.tokens, form.kv_heads, form.size, dtype=dtype).transpose(1, 2) for _ in range(4))
    lse, delta = (make(1, form.heads, form.tokens, dtype=torch.float32) for _ in range(2))
    if kernel == "attention":
        return [q, k, v, out, lse], [lse]
    if kernel == "attention_dq":
        return [d_out, q, k, v, out, lse, delta, dq], [lse, delta]
    return [d_out, q, k, v, lse, delta, dk, dv], [lse, delta]


def launch_of(
    kernel: str, form: Form, dtype: torch.dtype, make: Make, *, sizes: dict[str, int] | None = None,
    target: str | None = None,
) -> tuple[Launch, list[Tensor]]:  # fmt: skip
    """The launch over two documents, and the tensors that it reads and writes."""
    plan = {"attention": prepare_attention, "attention_dq": prepare_attention_dq}.get(kernel, prepare_attention_dkdv)
    moved, _ = operands(kernel, form, dtype, make)
    half = form.tokens // 2
    segments = [(0, 1, 0, half), (0, 1, half, form.tokens)]
    launch = plan(
        *moved, segments, scale=form.size**-0.5, window=form.window, softcap=form.softcap, causal=form.causal,
        target=target, sizes=sizes,
    )  # fmt: skip
    return launch, moved


def attention(kernel: str, form: Form) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        launch, moved = launch_of(kernel, form, dtype, make, target=target)
        return case(launch, *moved)

    return build


FORMS: dict[str, Form] = {
    "d64": Form(64),
    "d80": Form(80, heads=32, kv_heads=32),
    "d96": Form(96, heads=32, kv_heads=32),
    "d128": Form(128),
    "d128_window": Form(128, window=4096),
    "d128_bidirectional": Form(128, causal=False),
    "d128_full": Form(128, window=4096, softcap=30.0),
    "d256": Form(256, heads=16, kv_heads=8),
    "d256_full": Form(256, heads=16, kv_heads=8, window=4096, softcap=50.0),
}
ATTENTION_CASES: dict[str, Callable[[torch.dtype, Make, str | None], Case]] = {
    f"{kernel}_{name}": attention(kernel, form) for name, form in FORMS.items() for kernel in KERNELS
}


def attention_wanted(kernel: str, dtype: str, target: int | str) -> bool:
    """Whether a row belongs in the compile matrix; True for kernels that are not attention.

    Not sm_75, where attention is never Triton. bf16 for every form that tiles are chosen for, its most demanding one
    among them; fp16, whose code is the same but for its name, and fp32 once or twice (AMD's compiler knows no TF32).
    """
    if kernel not in ATTENTION_CASES:
        return True
    form = kernel.removeprefix("attention_").removeprefix("dq_").removeprefix("dkdv_")
    if target == 75 or form in TIMED_ONLY or (dtype == "fp32" and isinstance(target, str)):
        return False
    return dtype == "bf16" or form in {"fp16": FP16, "fp32": FP32}[dtype]
