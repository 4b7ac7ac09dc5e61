"""Weights as the operations see them: dense tensors, or quantised ones that hand out blocks of dense rows.

An operation walks over blocks of rows (`row_blocks`), or of columns (`column_blocks`) where it would have to sum over
rows, and a block of a few MB of a dequantised matrix exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from frugal.codecs.base import refuse_absent
from frugal.codecs.nf4 import NF4Tensors
from frugal.codecs.nf4_codes import BLOCK as NF4_BLOCK
from frugal.codecs.stacks import Pieces
from frugal.ops.registry import implements, resolve, simulates
from frugal.ops.simulated import is_fake, sampled

BLOCK_BYTES = 16 * 2**20  # dense bytes of one block of rows on a GPU: amortises the launch, far below a layer's matrix
CPU_BLOCK_BYTES = 4 * 2**20  # on a CPU: a block stays in the cache (products of 1024-row blocks ran 10 % faster)


@runtime_checkable
class QuantisedWeight(Protocol):
    """A [rows, columns] matrix stored in fewer bits. `frugal.codecs.nf4` supplies one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows ``start`` to ``stop`` as a dense [stop - start, columns] tensor of ``dtype``."""
        ...


Weight: TypeAlias = Tensor | QuantisedWeight


def rows(weight: Weight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows ``start`` to ``stop`` in ``dtype``: a view when nothing has to be converted."""
    if isinstance(weight, Tensor):
        return weight[start:stop].to(dtype)
    if dtype == torch.float64:  # quantised values are fp32 numbers; only tests compute wider
        return weight.dequantize_rows(start, stop, torch.float32).double()
    if isinstance(weight, Pieces):
        found = [rows(matrix, lo, hi, dtype) for matrix, lo, hi in weight.within(start, stop)]
        return found[0] if len(found) == 1 else torch.cat(found)
    if not isinstance(weight, NF4Tensors):
        return weight.dequantize_rows(start, stop, dtype)
    run, _ = resolve("nf4_rows", weight.packed, dtype=dtype)
    block: Tensor = run(weight, start, stop, dtype)
    return block


def columns(weight: Weight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Columns ``start`` to ``stop`` of a weight that `column_blocks` cuts, in ``dtype``: [rows, stop - start]."""
    if isinstance(weight, Tensor):
        return weight[:, start:stop].to(dtype)
    assert isinstance(weight, NF4Tensors)
    run, _ = resolve("nf4_rows", weight.packed, dtype=dtype)
    block: Tensor = run(weight, 0, weight.shape[0], dtype, columns=(start, stop))
    return block


@implements("nf4_rows", "torch")
def _nf4_rows(
    weight: NF4Tensors, start: int, stop: int, dtype: torch.dtype, columns: tuple[int, int] | None = None
) -> Tensor:
    if columns is None:
        return weight.dequantize_rows(start, stop, dtype)
    if is_fake(weight.packed):  # a plan: scales are looked up in a table, which has values
        _codes = weight.packed[:, columns[0] // 2 : columns[1] // 2].contiguous()
        _scales = weight.packed.new_empty(weight.absmax.shape, dtype=torch.float32)
        return _nf4_rows_simulated(weight, start, stop, dtype, columns)
    return weight.columns(*columns).dequantize_rows(start, stop, dtype)


@simulates("nf4_rows", "triton")
def _nf4_rows_simulated(
    weight: NF4Tensors, start: int, stop: int, dtype: torch.dtype, columns: tuple[int, int] | None = None
) -> Tensor:
    first, last = (0, weight.shape[1]) if columns is None else columns
    return weight.packed.new_empty(min(stop, weight.shape[0]) - start, last - first, dtype=dtype)


def block_rows(n_columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a block. A multiple of 64, which keeps NF4 blocks of 64 whole whatever the number of columns."""
    most = CPU_BLOCK_BYTES if device.type == "cpu" else BLOCK_BYTES
    return max(64, most // max(1, n_columns * dtype.itemsize) // 64 * 64)


def _refuse_absent(weight: Weight, device: torch.device) -> None:
    if isinstance(weight, NF4Tensors):
        weight.refuse_absent(device)
    elif isinstance(weight, Tensor):
        refuse_absent({"weight": weight}, device)


def row_blocks(weight: Weight, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[int, int]]:
    """Row ranges that cover the weight. One range on a GPU when it is dense and already in ``dtype``: no copy there.

    Raises ModelError, at once, for a weight whose bytes are not there: everything that reads rows asks here first.
    """
    _refuse_absent(weight, device)
    n_rows, n_columns = int(weight.shape[0]), int(weight.shape[1])
    step = block_rows(n_columns, dtype, device)
    if isinstance(weight, Tensor) and weight.dtype == dtype and device.type != "cpu":
        step = max(1, n_rows)
    like = weight if isinstance(weight, Tensor) else getattr(weight, "packed", None)
    starts = range(0, n_rows, step)
    return ((start, min(start + step, n_rows)) for start in (starts if like is None else sampled(starts, like)))


def column_blocks(weight: Weight, dtype: torch.dtype, device: torch.device) -> list[tuple[int, int]] | None:
    """Column ranges that cover the weight, a block's size each; None where columns cannot be had by themselves, or
    where one block of rows is all of it.

    A product with dY over a range of columns is a part of dX: nothing is summed over blocks, as it is over rows.
    Raises as `row_blocks`.
    """
    _refuse_absent(weight, device)
    n_rows, n_columns = int(weight.shape[0]), int(weight.shape[1])
    stored: Any = weight.packed if isinstance(weight, NF4Tensors) else weight
    if not isinstance(stored, Tensor) or (stored is not weight and n_columns % NF4_BLOCK):
        return None
    if block_rows(n_columns, dtype, device) >= n_rows:
        return None
    step = block_rows(n_rows, dtype, device)
    return [(lo, min(lo + step, n_columns)) for lo in sampled(range(0, n_columns, step), stored)]


def matmul_t(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """x [tokens, columns] times weight^T: [tokens, rows], block of rows by block of rows, in x's dtype. No autograd."""
    if out is None:
        out = x.new_empty(x.shape[0], int(weight.shape[0]))
    for start, stop in row_blocks(weight, x.dtype, x.device):
        torch.mm(x, rows(weight, start, stop, x.dtype).t(), out=out[:, start:stop])
    return out


def matmul_add_(out: Tensor, grad: Tensor, weight: Weight) -> Tensor:
    """out [tokens, columns] += grad [tokens, rows] times weight, in place, block by block. No autograd."""
    for start, stop in row_blocks(weight, grad.dtype, grad.device):
        out.addmm_(grad[:, start:stop], rows(weight, start, stop, grad.dtype))
    return out
