"""NF4 to dense rows, and to dense rows with a low-rank update added, in one pass.

Numbers are bitsandbytes' bit for bit: code times scale in float32, rounded once; with double quantisation the scale is
code times nested scale, rounded, plus the offset, rounded. The compiler must not fuse the two (`enable_fp_fusion`).

Traffic of n elements: n/2 bytes of codes, n/64 (double) or n/16 bytes of scales in, n elements out. The fused form adds
A and B, which are small, and saves what adding the update afterwards costs: reading and writing the dense rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from frugal.codecs.nf4 import NF4Tensors
from frugal.codecs.nf4_codes import nested_code, nf4_code
from frugal.ops.launch import Launch, cdiv, tile
from frugal.ops.registry import implements

BLOCK = 64  # elements that share a scale
NESTED_BLOCK = 256  # scales that share a scale


@dataclass(frozen=True)
class Nf4Parts:
    """The stored tensors of one matrix as `frugal.codecs.NF4Tensors` keeps them, and the code tables, on one device."""

    packed: Tensor
    """uint8, two codes a byte, high nibble first."""
    absmax: Tensor
    """A scale a block of 64: uint8 codes, or int32 bit patterns of float32."""
    nested_absmax: Tensor | None
    """int32 bit patterns of float32, one for 256 scales; None without double quantisation."""
    offset: Tensor | None
    """int32 bit pattern of float32, [1]."""
    code: Tensor
    """float32 [16]."""
    nested_code: Tensor | None
    """float32 [256]; None without double quantisation."""

    @property
    def double(self) -> bool:
        """Whether the scales are quantised too."""
        return self.nested_absmax is not None

    def pointers(self) -> tuple[Tensor | None, ...]:
        """In the kernels' order, bit patterns seen as float32."""
        if self.nested_absmax is None or self.offset is None:
            return self.packed, self.absmax.view(torch.float32), None, None, self.code, None
        nested, offset = self.nested_absmax.view(torch.float32), self.offset.view(torch.float32)
        return self.packed, self.absmax, nested, offset, self.code, self.nested_code


@triton.jit
def block_scale(ABSMAX, NESTED, OFFSET, NESTED_CODE, block, mask, DOUBLE: tl.constexpr):
    """float32 scales of ``block`` (numbers of blocks in the matrix)."""
    if DOUBLE:
        stored = tl.load(ABSMAX + block, mask=mask, other=0).to(tl.int32)
        nested = tl.load(NESTED + block // 256, mask=mask, other=0.0)
        return tl.load(NESTED_CODE + stored) * nested + tl.load(OFFSET)
    else:
        return tl.load(ABSMAX + block, mask=mask, other=0.0)


@triton.jit
def nf4_dequantize_kernel(
    PACKED, ABSMAX, NESTED, OFFSET, CODE, NESTED_CODE, OUT, start, count, width, pitch,
    DOUBLE: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # start (a multiple of 64) and count in elements of the flattened matrix. COLUMNS: count elements of some columns,
    # width blocks of 64 of each row, whose rows are pitch blocks long; start is the first row's first element.
    local = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    stored = local
    if COLUMNS:
        stored = local // width * pitch + local % width
    scale = block_scale(ABSMAX, NESTED, OFFSET, NESTED_CODE, start // 64 + stored, local * 64 < count, DOUBLE)
    inner = tl.arange(0, 32)[None, :]
    inside = local[:, None] * 64 + inner * 2 < count
    codes = tl.load(PACKED + start // 2 + stored[:, None] * 32 + inner, mask=inside, other=0).to(tl.int32)
    pairs = tl.join(tl.load(CODE + (codes >> 4)), tl.load(CODE + (codes & 15)))
    values = tl.reshape(pairs, (BLOCKS, 64)) * scale[:, None]
    element = local[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(OUT + element, values.to(OUT.dtype.element_ty), mask=element < count)


@triton.jit
def nf4_lora_kernel(
    PACKED, ABSMAX, NESTED, OFFSET, CODE, NESTED_CODE, A, B, OUT, first_row, rows, columns, rank, lora_scale,
    stride_a, stride_b, stride_out,
    DOUBLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Rows first_row .. first_row + rows of W + lora_scale * B A; columns is a multiple of 64.
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row_in, column_in = row[:, None] < rows, column[None, :] < columns
    update = tl.zeros((BM, BN), tl.float32)
    for k in range(0, rank, BK):
        inner = k + tl.arange(0, BK)
        b_at = (first_row + row).to(tl.int64)[:, None] * stride_b + inner[None, :]
        b = tl.load(B + b_at, mask=row_in & (inner[None, :] < rank), other=0.0)
        a_at = inner.to(tl.int64)[:, None] * stride_a + column[None, :]
        a = tl.load(A + a_at, mask=(inner[:, None] < rank) & column_in, other=0.0)
        update = tl.dot(b, a, update, input_precision="ieee")
    n_blocks = columns // 64
    block_column = tl.program_id(0) * (BN // 64) + tl.arange(0, BN // 64)
    block = (first_row + row).to(tl.int64)[:, None] * n_blocks + block_column[None, :]
    inside = row_in & (block_column[None, :] < n_blocks)
    scale = block_scale(ABSMAX, NESTED, OFFSET, NESTED_CODE, block, inside, DOUBLE)
    byte = block[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    codes = tl.load(PACKED + byte, mask=inside[:, :, None], other=0).to(tl.int32)
    pairs = tl.join(tl.load(CODE + (codes >> 4)), tl.load(CODE + (codes & 15)))
    dense = tl.reshape(tl.reshape(pairs, (BM, BN // 64, 64)) * scale[:, :, None], (BM, BN))
    out_at = row.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(OUT + out_at, (dense + lora_scale * update).to(OUT.dtype.element_ty), mask=row_in & column_in)


def prepare_dequantize(
    parts: Nf4Parts, start: int, stop: int, out: Tensor, target: str | None = None, *, width: int = 0, pitch: int = 0
) -> Launch:
    """Elements ``start`` (a multiple of 64) to ``stop`` of the flattened matrix into ``out`` [stop - start].

    With ``width``, the columns of a block: the same number of elements, ``width`` of every ``pitch`` from ``start`` on.
    Both are multiples of 64.
    """
    if start % BLOCK or width % BLOCK or pitch % BLOCK:
        raise ValueError(f"start, width and pitch must be multiples of {BLOCK}, got {start}, {width}, {pitch}")
    sizes = tile("nf4_dequantize", out.dtype, out.device, target)
    blocks, count = sizes.pop("BLOCKS"), stop - start
    return Launch(
        nf4_dequantize_kernel,
        (cdiv(cdiv(count, BLOCK), blocks),),
        (*parts.pointers(), out, start, count, max(1, width // BLOCK), max(1, pitch // BLOCK)),
        {"DOUBLE": parts.double, "BLOCKS": blocks, "COLUMNS": width > 0},
        {**sizes, "enable_fp_fusion": False},
    )


def dequantize(parts: Nf4Parts, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Elements ``start`` (a multiple of 64) to ``stop`` of the flattened matrix as a [stop - start] tensor."""
    out = torch.empty(stop - start, dtype=dtype, device=parts.packed.device)
    prepare_dequantize(parts, start, stop, out).run()
    return out


def prepare_dequantize_lora(
    parts: Nf4Parts, a: Tensor, b: Tensor, scale: float, first_row: int, out: Tensor, target: str | None = None
) -> Launch:
    """Rows from ``first_row`` on of W + scale * B A into ``out`` [rows, columns]; A [r, columns], B [all rows, r].

    Raises ``ValueError`` unless a row is a whole number of blocks of 64.
    """
    rows, columns = out.shape
    if columns % BLOCK:
        raise ValueError(f"columns must be a multiple of {BLOCK}, got {columns}")
    if a.stride(1) != 1 or b.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("A, B and out must be contiguous in their last dimension")
    sizes = tile("nf4_lora", out.dtype, out.device, target)
    bm, bn, bk = sizes.pop("BM"), sizes.pop("BN"), sizes.pop("BK")
    return Launch(
        nf4_lora_kernel,
        (cdiv(columns, bn), cdiv(rows, bm)),
        (*parts.pointers(), a, b, out, first_row, rows, columns, a.shape[0], float(scale),
         a.stride(0), b.stride(0), out.stride(0)),
        {"DOUBLE": parts.double, "BM": bm, "BN": bn, "BK": bk},
        {**sizes, "enable_fp_fusion": False},
    )  # fmt: skip


def dequantize_lora(parts: Nf4Parts, a: Tensor, b: Tensor, scale: float, first_row: int, out: Tensor) -> Tensor:
    """Run `prepare_dequantize_lora`; returns ``out``."""
    prepare_dequantize_lora(parts, a, b, scale, first_row, out).run()
    return out


@implements("nf4_rows", "triton")
def nf4_rows(
    weight: NF4Tensors, start: int, stop: int, dtype: torch.dtype, columns: tuple[int, int] | None = None
) -> Tensor:
    """Rows ``start`` to ``stop`` of an NF4 matrix in one launch (bitsandbytes takes three to five).

    ``columns`` (first, last + 1), multiples of 64: only those.
    """
    pitch = weight.shape[1]
    stop = min(stop, weight.shape[0])
    if columns is not None:
        width, at = columns[1] - columns[0], start * pitch + columns[0]
        out = torch.empty(stop - start, width, dtype=dtype, device=weight.packed.device)
        prepare_dequantize(_parts(weight), at, at + out.numel(), out, width=width, pitch=pitch).run()
        return out
    first, last = start * pitch, stop * pitch
    aligned = first // BLOCK * BLOCK
    flat = dequantize(_parts(weight), aligned, last, dtype)
    return flat[first - aligned :].view(-1, pitch)


@implements("nf4_rows_with_update", "triton")
def nf4_rows_with_update(
    weight: NF4Tensors, start: int, stop: int, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """Rows ``start`` to ``stop`` of W + scale * B A in one pass; columns must be a multiple of 64."""
    out = torch.empty(min(stop, weight.shape[0]) - start, weight.shape[1], dtype=dtype, device=weight.packed.device)
    return dequantize_lora(_parts(weight), a, b, scale, start, out)


def _parts(weight: NF4Tensors) -> Nf4Parts:
    device = weight.packed.device
    nested = None if weight.nested_absmax is None else nested_code(device)
    return Nf4Parts(weight.packed, weight.absmax, weight.nested_absmax, weight.offset, nf4_code(device), nested)
