"""Launches of every kernel at the shapes of Llama-3.1-8B and with the bytes they should move.

One list for all evidence: compiled ahead of time (meta tensors), counted and sampled in the interpreter (sparse
tensors), timed on a GPU (real ones). `CASES` maps a name to a function of (dtype, make, target); ``make(*shape,
dtype=...)`` gives a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frugal.ops.adam8bit.triton import prepare_adam8bit
from frugal.ops.gated_mlp.triton import Activation, prepare_gated, prepare_gated_backward
from frugal.ops.launch import Launch
from frugal.ops.linear_cross_entropy.triton import levels_shape, prepare_cross_entropy, prepare_cross_entropy_once
from frugal.ops.rms_norm.triton import prepare_rms_norm, prepare_rms_norm_backward
from frugal.ops.rope.triton import prepare_rope
from frugal.ops.weights.triton import Nf4Parts, prepare_dequantize, prepare_dequantize_lora

Make = Callable[..., Tensor]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

TOKENS, HIDDEN, INTERMEDIATE, RANK = 8192, 4096, 14336, 32
Q_HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128


@dataclass(frozen=True)
class Case:
    """A launch and its ideal traffic."""

    launch: Launch
    ideal_bytes: int
    """Bytes of its inputs once and of its outputs once."""
    least_bytes: int | None = None
    """What the algorithm must move where that is more: the reason is in the kernel's file."""
    resident: tuple[Tensor, ...] = ()
    """Small inputs that all programs share: the second-level cache keeps them. Not part of ``ideal_bytes``."""


def case(
    launch: Launch, *moved: Tensor | None, least_bytes: int | None = None, resident: tuple[Tensor, ...] = ()
) -> Case:
    """``moved``: each tensor read and each written; one updated in place is named twice."""
    ideal = sum(t.numel() * t.element_size() for t in moved if t is not None)
    return Case(launch, ideal, least_bytes, resident)


def nf4_parts(rows: int, columns: int, make: Make, double: bool) -> Nf4Parts:
    """Storage of a [rows, columns] matrix, undefined values."""
    blocks = rows * columns // 64
    packed = make(rows, columns // 2, dtype=torch.uint8)
    code = make(16, dtype=torch.float32)
    if not double:
        return Nf4Parts(packed, make(blocks, dtype=torch.int32), None, None, code, None)
    nested = make(-(blocks // -256), dtype=torch.int32)
    offset = make(1, dtype=torch.int32)
    return Nf4Parts(
        packed, make(blocks, dtype=torch.uint8), nested, offset, code, make(256, dtype=torch.float32)
    )  # fmt: skip


def nf4(double: bool, lora: bool) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        parts = nf4_parts(INTERMEDIATE, HIDDEN, make, double)
        stored = (parts.packed, parts.absmax, parts.nested_absmax, parts.offset)
        tables = tuple(t for t in (parts.code, parts.nested_code) if t is not None)
        out = make(INTERMEDIATE, HIDDEN, dtype=dtype)
        if not lora:
            return case(prepare_dequantize(parts, 0, out.numel(), out, target), *stored, out, resident=tables)
        a, b = make(RANK, HIDDEN, dtype=dtype), make(INTERMEDIATE, RANK, dtype=dtype)
        return case(prepare_dequantize_lora(parts, a, b, 2.0, 0, out, target), *stored, out, resident=(a, b, *tables))

    return build


def norm(rows: int, columns: int) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        x, w, out = make(rows, columns, dtype=dtype), make(columns, dtype=dtype), make(rows, columns, dtype=dtype)
        return case(prepare_rms_norm(x, w, 1e-5, 0.0, out, target), x, w, out)

    return build


def norm_backward(weight_grad: bool, columns: int = HIDDEN) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        dy, x, dx = (make(TOKENS, columns, dtype=dtype) for _ in range(3))
        w = make(columns, dtype=dtype)
        launch, _ = prepare_rms_norm_backward(dy, x, w, 1e-5, 0.0, dx, False, target)
        if not weight_grad:
            return case(launch, dy, x, w, dx)
        launch, partial = prepare_rms_norm_backward(dy, x, w, 1e-5, 0.0, dx, True, target)
        assert partial is not None
        args = list(launch.args)
        args[4] = make(*partial.shape, dtype=torch.float32)
        launch = Launch(launch.kernel, launch.grid, args, launch.constants, launch.options)
        return case(launch, dy, x, w, dx, make(columns, dtype=torch.float32))

    return build


def rope(backward: bool) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        q = make(1, TOKENS, Q_HEADS, HEAD_SIZE, dtype=dtype).transpose(1, 2)
        k = make(1, TOKENS, KV_HEADS, HEAD_SIZE, dtype=dtype).transpose(1, 2)
        cos, sin = (make(1, TOKENS, HEAD_SIZE, dtype=dtype)[..., : HEAD_SIZE // 2] for _ in range(2))
        return case(prepare_rope(q, k, cos, sin, backward=backward, target=target), q, q, k, k, cos, sin)

    return build


def gated(activation: Activation, backward: bool) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        both, out = make(TOKENS, 2 * INTERMEDIATE, dtype=dtype), make(TOKENS, INTERMEDIATE, dtype=dtype)
        gate, up = both[:, :INTERMEDIATE], both[:, INTERMEDIATE:]
        if backward:
            return case(prepare_gated_backward(out, gate, up, activation, target), out, gate, up, gate, up)
        return case(prepare_gated(gate, up, out, activation, target), gate, up, out)

    return build


def cross_entropy(vocab: int, **options: Any) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        logits, labels = make(256, vocab, dtype=dtype), make(256, dtype=torch.int64)
        loss = make(256, dtype=torch.float32)
        launch = prepare_cross_entropy(logits, labels, loss, target=target, **options)
        twice = not launch.constants["ONE_READ"]
        least = None
        if twice:
            least = 3 * logits.numel() * logits.element_size() + labels.numel() * 8 + loss.numel() * 4
        return case(launch, logits, logits, labels, loss, least_bytes=least)

    return build


def cross_entropy_once(vocab: int, **options: Any) -> Callable[[torch.dtype, Make, str | None], Case]:
    def build(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
        logits, labels = make(256, vocab, dtype=dtype), make(256, dtype=torch.int64)
        loss, factor = make(256, dtype=torch.float32), make(256, dtype=torch.float32)
        levels = make(*levels_shape(logits, target), dtype=torch.float32)
        launch = prepare_cross_entropy_once(logits, labels, loss, factor, levels, target=target, **options)
        return case(launch, logits, logits, labels, loss, factor)

    return build


def adam(dtype: torch.dtype, make: Make, target: str | None = None) -> Case:
    count = INTERMEDIATE * RANK
    param, grad = make(count, dtype=dtype), make(count, dtype=dtype)
    states = [make(count, dtype=torch.uint8) for _ in range(2)]
    scales = [make(count // 256, dtype=torch.float32) for _ in range(2)]
    maps = [make(256, dtype=torch.float32) for _ in range(2)]
    launch = prepare_adam8bit(
        param, grad, *states, *scales, *maps,
        lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=2, target=target,
    )  # fmt: skip
    return case(launch, param, param, grad, *states, *states, *scales, *scales, resident=tuple(maps))


CASES: dict[str, Callable[[torch.dtype, Make, str | None], Case]] = {
    "nf4_dequantize_double": nf4(double=True, lora=False),
    "nf4_dequantize_single": nf4(double=False, lora=False),
    "nf4_lora_double": nf4(double=True, lora=True),
    "nf4_lora_single": nf4(double=False, lora=True),
    "rms_norm": norm(TOKENS, HIDDEN),
    "rms_norm_8192": norm(TOKENS, 8192),
    "rms_norm_heads": norm(TOKENS * Q_HEADS, HEAD_SIZE),
    "rms_norm_backward": norm_backward(weight_grad=False),
    "rms_norm_backward_weight": norm_backward(weight_grad=True),
    "rms_norm_backward_weight_8192": norm_backward(weight_grad=True, columns=8192),
    "rope": rope(backward=False),
    "rope_backward": rope(backward=True),
    "gated_silu": gated("silu", backward=False),
    "gated_gelu": gated("gelu", backward=False),
    "gated_gelu_tanh": gated("gelu_tanh", backward=False),
    "gated_silu_backward": gated("silu", backward=True),
    "gated_gelu_backward": gated("gelu", backward=True),
    "gated_gelu_tanh_backward": gated("gelu_tanh", backward=True),
    "cross_entropy_32000": cross_entropy(32000),
    "cross_entropy_128256": cross_entropy(128256),
    "cross_entropy_262144_capped": cross_entropy(262144, softcap=30.0, label_smoothing=0.1),
    "cross_entropy_once_128256": cross_entropy_once(128256),
    "cross_entropy_once_262144_capped": cross_entropy_once(262144, softcap=30.0),
    "adam8bit": adam,
}
