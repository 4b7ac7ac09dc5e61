"""One AdamW step with block-wise 8-bit moments, in place, in bitsandbytes' format and arithmetic.

Both moments are bytes that index a map of 256 rising values, times one float32 scale for 256 elements (Dettmers et al.
2022, arXiv:2110.02861). A program takes whole blocks, so each scale is read and written by one program. Parameter and
gradient are read once, the parameter and both moments are written once; nothing of the size of the parameter is
allocated.

A moment's new byte is the nearest entry of the map, as in bitsandbytes' CUDA kernels; its CPU code looks it up in cells
of 3e-5, which differ from the nearest near midpoints and close to zero.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.launch import Launch, cdiv, tile
from frugal.ops.registry import implements

BLOCK = 256  # elements that share a scale


@triton.jit
def nearest_code(MAP, value):
    """Index of the entry of MAP (256 rising float32) that is nearest to value; the lower of two equally near."""
    index = tl.zeros_like(value).to(tl.int32)
    step = 128
    for _ in tl.static_range(8):
        index = tl.where(tl.load(MAP + index + step) <= value, index + step, index)
        step = step // 2
    above = tl.minimum(index + 1, 255)
    return tl.where(tl.load(MAP + above) - value < value - tl.load(MAP + index), above, index)


@triton.jit
def quantize(MAP, STATE, ABSMAX, value, at, block, mask, n_blocks):
    """Store value [blocks, 256] as bytes and scales."""
    scale = tl.max(tl.abs(value), 1)
    # A block of zeros keeps scale 0 and the code of 0.
    safe = tl.where(scale == 0.0, 1.0, scale)
    codes = nearest_code(MAP, tl.div_rn(value, tl.broadcast_to(safe[:, None], value.shape)))
    tl.store(STATE + at, codes.to(tl.uint8), mask=mask)
    tl.store(ABSMAX + block, scale, mask=block < n_blocks)


@triton.jit
def adam8bit_kernel(
    PARAM, GRAD, STATE1, STATE2, ABSMAX1, ABSMAX2, MAP1, MAP2, count, n_blocks,
    beta1, beta2, rest1, rest2, eps, step_size, correction2, decay,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    mask = at < count
    grad = tl.load(GRAD + at, mask=mask, other=0.0).to(tl.float32)
    scale1 = tl.load(ABSMAX1 + block, mask=block < n_blocks, other=0.0)
    scale2 = tl.load(ABSMAX2 + block, mask=block < n_blocks, other=0.0)
    first = tl.load(MAP1 + tl.load(STATE1 + at, mask=mask, other=0).to(tl.int32)) * scale1[:, None]
    second = tl.load(MAP2 + tl.load(STATE2 + at, mask=mask, other=0).to(tl.int32)) * scale2[:, None]
    first = tl.where(mask, first * beta1 + rest1 * grad, 0.0)
    second = tl.where(mask, second * beta2 + rest2 * grad * grad, 0.0)
    param = tl.load(PARAM + at, mask=mask, other=0.0).to(tl.float32) * decay
    param -= step_size * (first / (tl.sqrt(second) / correction2 + eps))
    tl.store(PARAM + at, param.to(PARAM.dtype.element_ty), mask=mask)
    quantize(MAP1, STATE1, ABSMAX1, first, at, block, mask, n_blocks)
    quantize(MAP2, STATE2, ABSMAX2, second, at, block, mask, n_blocks)


def prepare_adam8bit(
    param: Tensor,
    grad: Tensor,
    state1: Tensor,
    state2: Tensor,
    absmax1: Tensor,
    absmax2: Tensor,
    map1: Tensor,
    map2: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    target: str | None = None,
) -> Launch:
    """Update ``param`` and its state in place; ``step`` counts from 1. All but the maps are contiguous and alike in
    number of elements; ``absmax1`` and ``absmax2`` are float32 [ceil(elements / 256)], the maps float32 [256].

    Parameter and gradient may have different dtypes.
    """
    tensors = (param, grad, state1, state2)
    if any(not t.is_contiguous() or t.numel() != param.numel() for t in tensors):
        raise ValueError("adam8bit: parameter, gradient and moments must be contiguous and alike in size")
    n_blocks = cdiv(param.numel(), BLOCK)
    if absmax1.numel() != n_blocks or absmax2.numel() != n_blocks:
        raise ValueError(f"adam8bit: {n_blocks} scales expected, got {absmax1.numel()} and {absmax2.numel()}")
    sizes = tile("adam8bit", param.dtype, param.device, target)
    blocks = sizes.pop("BLOCKS")
    beta1, beta2 = betas
    return Launch(
        adam8bit_kernel,
        (cdiv(n_blocks, blocks),),
        (*tensors, absmax1, absmax2, map1, map2, param.numel(), n_blocks, beta1, beta2, 1.0 - beta1, 1.0 - beta2,
         float(eps), lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step), 1.0 - lr * weight_decay),
        {"BLOCKS": blocks},
        sizes,
    )  # fmt: skip


@implements("adam8bit", "triton")
def adam8bit_(
    param: Tensor,
    grad: Tensor,
    state1: Tensor,
    state2: Tensor,
    absmax1: Tensor,
    absmax2: Tensor,
    map1: Tensor,
    map2: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Run `prepare_adam8bit`."""
    prepare_adam8bit(
        param, grad, state1, state2, absmax1, absmax2, map1, map2,
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step,
    ).run()  # fmt: skip
