"""The element-wise part of a gated MLP, act(gate) * up, forward and backward, in place.

Rows may have any stride, so that gate and up can be the halves of one buffer. Forward reads gate and up and writes one
tensor (which may be either of them). Backward reads the gradient, gate and up, and writes the gradients of gate and up
over them: no further memory, five tensors of traffic.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.launch import Launch, cdiv, tile

Activation = Literal["silu", "gelu", "gelu_tanh"]
_CODES: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """(act(g), act'(g)) in float32: 0 SiLU, 1 GELU (erf), 2 GELU (tanh)."""
    if ACTIVATION == 0:
        s = tl.sigmoid(g)
        value = g * s
        slope = s + value * (1.0 - s)
    elif ACTIVATION == 1:
        s = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
        value = g * s
        slope = s + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        # 0.5 (1 + tanh(y)) = sigmoid(2 y) with y = sqrt(2/pi) (g + 0.044715 g^3)
        y2 = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        s = tl.sigmoid(y2)
        value = g * s
        # 1 - s would lose its digits where s is near 1.
        slope = s + value * tl.sigmoid(-y2) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    return value, slope


@triton.jit
def gated_kernel(
    GATE, UP, OUT, stride_gate, stride_up, stride_out, columns,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    g = tl.load(GATE + row * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(UP + row * stride_up + column, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(g, ACTIVATION)
    tl.store(OUT + row * stride_out + column, (value * u).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward_kernel(
    GRAD, GATE, UP, stride_grad, stride_gate, stride_up, columns,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    d = tl.load(GRAD + row * stride_grad + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(GATE + row * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(UP + row * stride_up + column, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate(g, ACTIVATION)
    tl.store(GATE + row * stride_gate + column, (d * u * slope).to(GATE.dtype.element_ty), mask=mask)
    tl.store(UP + row * stride_up + column, (d * value).to(UP.dtype.element_ty), mask=mask)


def _prepare(
    kernel: object, name: str, tensors: tuple[Tensor, Tensor, Tensor], activation: Activation, target: str | None
) -> Launch:
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype != first.dtype or t.dim() != 2 for t in tensors):
        raise ValueError(f"gated: three [rows, columns] tensors of one dtype expected, got "
                         f"{[(tuple(t.shape), t.dtype) for t in tensors]}")  # fmt: skip
    if any(t.stride(1) != 1 and t.shape[1] > 1 for t in tensors):
        raise ValueError("gated: columns must lie side by side")
    rows, columns = first.shape
    if all(t.is_contiguous() for t in tensors):
        rows, columns = 1, rows * columns
    sizes = tile(name, first.dtype, first.device, target)
    block = sizes.pop("BLOCK")
    return Launch(
        kernel,
        (rows * cdiv(columns, block),),
        (*tensors, *(t.stride(0) for t in tensors), columns),
        {"ACTIVATION": _CODES[activation], "BLOCK": block},
        sizes,
    )


def prepare_gated(gate: Tensor, up: Tensor, out: Tensor, activation: Activation, target: str | None = None) -> Launch:
    """``out`` = act(gate) * up, all [rows, columns]; ``out`` may be ``gate`` or ``up``."""
    return _prepare(gated_kernel, "gated", (gate, up, out), activation, target)


def gated(gate: Tensor, up: Tensor, out: Tensor, activation: Activation = "silu") -> Tensor:
    """Run `prepare_gated`; returns ``out``."""
    prepare_gated(gate, up, out, activation).run()
    return out


def prepare_gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: Activation, target: str | None = None
) -> Launch:
    """``gate`` and ``up`` become their own gradients; ``grad`` [rows, columns] is that of act(gate) * up."""
    return _prepare(gated_backward_kernel, "gated_backward", (grad, gate, up), activation, target)


def gated_backward_(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation = "silu") -> None:
    """Run `prepare_gated_backward`."""
    prepare_gated_backward(grad, gate, up, activation).run()
