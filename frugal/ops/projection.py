"""A linear layer with a low-rank update as a value, and the arithmetic that `lora_linear` and `gated_mlp` share.

y = x W^T + bias + scale * (x A^T) B^T with W [out, in] dense or quantised, A [r, in], B [out, r]. Dense rows of a
quantised W exist a block at a time. In fp32 and with enough tokens the update is added to the block of dense rows
(W + scale * B A) before the product: out * in * r multiplications instead of tokens * r * (in + out), and one product
instead of three. In 16 bits a small update would be rounded away there, so the products stay apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.codecs.nf4 import NF4Tensors
from frugal.ops.registry import implements, resolve
from frugal.ops.weights import Weight, block_rows, column_blocks, columns, row_blocks, rows

Lora = tuple[Tensor, Tensor, float]
N_TENSORS = 4  # weight, bias, A, B: what autograd sees of a projection


@dataclass(frozen=True)
class Projection:
    """W (dense or quantised), bias, and (A, B, scale) or None."""

    weight: Weight
    bias: Tensor | None = None
    lora: Lora | None = None

    @property
    def out_features(self) -> int:
        """Rows of W."""
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        """Columns of W."""
        return int(self.weight.shape[1])

    def tensors(self) -> tuple[Tensor | None, ...]:
        """(dense W or None, bias, A, B) for ``autograd.Function.apply``."""
        a, b = (None, None) if self.lora is None else self.lora[:2]
        return (self.weight if isinstance(self.weight, Tensor) else None, self.bias, a, b)

    def rebuilt(self, tensors: tuple[Tensor | None, ...]) -> Projection:
        """The same projection over what autograd handed back for `tensors`."""
        weight, bias, a, b = tensors
        lora = None if self.lora is None or a is None or b is None else (a, b, self.lora[2])
        return Projection(self.weight if weight is None else weight, bias, lora)

    def frozen(self) -> Projection:
        """What may be kept outside of autograd: no tensor that autograd follows."""
        weight = torch.empty(0, 0) if isinstance(self.weight, Tensor) else self.weight
        lora = None if self.lora is None else (torch.empty(0), torch.empty(0), self.lora[2])
        return Projection(weight, None, lora)


def projection_reference(x: Tensor, p: Projection, dropped: Tensor | None = None) -> Tensor:
    """The definition. ``dropped`` is the adapter's input where it differs from x. Autograd keeps what it likes."""
    weight = p.weight if isinstance(p.weight, Tensor) else rows(p.weight, 0, p.out_features, x.dtype)
    y = F.linear(x, weight.to(x.dtype), None if p.bias is None else p.bias.to(x.dtype))
    if p.lora is None:
        return y
    a, b, scale = p.lora
    return y + scale * F.linear(F.linear(x if dropped is None else dropped, a.to(x.dtype)), b.to(x.dtype))


@dataclass
class ProjectionGrads:
    """Gradients of one projection's tensors, summed over tiles in fp32 (fp64 for fp64); None where nobody asked."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    @staticmethod
    def zeros(p: Projection, needs: tuple[bool, ...]) -> ProjectionGrads:
        """Buffers for the tensors whose flag in ``needs`` (order of `Projection.tensors`) is set."""

        def zero(t: Tensor | None, wanted: bool) -> Tensor | None:
            if t is None or not wanted:
                return None
            return torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))

        return ProjectionGrads(*(zero(t, n) for t, n in zip(p.tensors(), needs, strict=True)))

    @property
    def wants_input(self) -> bool:
        """Whether a gradient needs the layer's input."""
        return any(g is not None for g in (self.weight, self.a, self.b))

    def like(self, p: Projection) -> tuple[Tensor | None, ...]:
        """The gradients in the dtypes of their tensors."""
        found = (self.weight, self.bias, self.a, self.b)
        return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(found, p.tensors(), strict=True))


@dataclass
class LoraMatmul:
    """A projection at work on tiles of one call, in one compute dtype, without autograd."""

    p: Projection
    dtype: torch.dtype
    device: torch.device
    tokens: int
    """Tokens of the whole call: decides whether adding the update to W pays."""
    dropped: bool = False
    """The adapter reads another input than x, so the update cannot be added to W."""
    _held: list[tuple[int, int, Tensor]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        rows_, columns = self.p.out_features, self.p.in_features
        wide = self.dtype in (torch.float32, torch.float64)
        pays = self.tokens * (rows_ + columns) > rows_ * columns
        self.merged = self.p.lora is not None and wide and pays and not self.dropped
        a, b, scale = (None, None, 1.0) if self.p.lora is None else self.p.lora
        self.scale = scale
        self.a = None if a is None else a.to(self.dtype)
        self.b = None if b is None else b.to(self.dtype)

    def _fresh(self, whole: bool) -> Iterator[tuple[int, int, Tensor]]:
        weight = self.p.weight
        ranges: Iterable[tuple[int, int]] = row_blocks(weight, self.dtype, self.device)
        if whole:
            ranges = [(0, self.p.out_features)]
        elif self.merged:  # the sum is a copy, also of a dense W
            n_rows, step = self.p.out_features, block_rows(self.p.in_features, self.dtype, self.device)
            ranges = ((lo, min(lo + step, n_rows)) for lo in range(0, n_rows, step))
        for start, stop in ranges:
            if self.merged and isinstance(weight, NF4Tensors) and self.a is not None and self.b is not None:
                run, _ = resolve("nf4_rows_with_update", weight.packed, dtype=self.dtype, columns=self.p.in_features)
                yield start, stop, run(weight, start, stop, self.a, self.b, self.scale, self.dtype)
                continue
            block = rows(weight, start, stop, self.dtype)
            if self.merged and self.a is not None and self.b is not None:
                b = self.b[start:stop]
                if isinstance(weight, Tensor) and weight.dtype == self.dtype:
                    block = torch.addmm(block, b, self.a, alpha=self.scale)
                else:  # dequantised or converted: a temporary of our own
                    block.addmm_(b, self.a, alpha=self.scale)
            yield start, stop, block

    def blocks(self, whole: bool = False) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, last row + 1, dense rows). One that covers W is kept for the next tile; more are made again.

        ``whole``: all rows in one block, whatever their size.
        """
        if self._held is not None:
            yield from self._held
            return
        for start, stop, block in self._fresh(whole):
            if (start, stop) == (0, self.p.out_features):
                self._held = [(start, stop, block)]
            yield start, stop, block

    def release(self) -> None:
        """Drop the dense matrix."""
        self._held = None

    def forward(self, x: Tensor, out: Tensor, dropped: Tensor | None = None) -> Tensor:
        """out [tile, out_features] = projection of x [tile, in_features]; out may be a slice of a wider buffer."""
        for start, stop, block in self.blocks():
            torch.mm(x, block.t(), out=out[:, start:stop])
        if self.p.bias is not None:
            out += self.p.bias.to(self.dtype)
        if self.a is not None and self.b is not None and not self.merged:
            u = torch.mm(x if dropped is None else dropped, self.a.t())
            out.addmm_(u, self.b.t(), alpha=self.scale)
        return out

    def input_grad(
        self, dy: Tensor, dx: Tensor, first: bool, keep: Tensor | None = None, du: Tensor | None = None
    ) -> Tensor:
        """dx [tile, in_features] = (or +=, unless ``first``) gradient through the projection of dy.

        ``keep`` [tile, in_features] is the dropout's scaled mask, ``du`` what `own_grads` gave for this dy; it is
        overwritten. In 16 bits W is cut by columns, each of which gives its part of dx with one rounding, as the whole
        W would. W is whole where nothing has to be converted, and where a tile is larger than it: then it is kept for
        the next one.
        """
        narrow, weight = self.dtype.itemsize < 4, self.p.weight
        whole = narrow and (
            dy.shape[0] * (4 + self.dtype.itemsize) > self.p.out_features * self.dtype.itemsize
            or (isinstance(weight, Tensor) and weight.dtype == self.dtype)
        )
        by_rows = not narrow or whole or self._held is not None
        cut = None if by_rows else column_blocks(weight, self.dtype, self.device)
        if cut is None:
            self._by_rows(dy, dx, first, narrow, whole)
        for start, stop in cut or ():
            block = columns(weight, start, stop, self.dtype)
            if first:
                torch.mm(dy, block, out=dx[:, start:stop])
            else:
                dx[:, start:stop].addmm_(dy, block)
        if self.a is not None and self.b is not None and not self.merged:
            du = (torch.mm(dy, self.b) if du is None else du).mul_(self.scale)
            if keep is None:
                dx.addmm_(du, self.a)
            else:
                dx += torch.mm(du, self.a).mul_(keep)
        return dx

    def _by_rows(self, dy: Tensor, dx: Tensor, first: bool, narrow: bool, whole: bool) -> None:
        """dx by blocks of rows; in 16 bits several are summed in fp32."""
        total: Tensor | None = None
        for start, stop, block in self.blocks(whole):
            part = dy[:, start:stop]
            if narrow and (start, stop) != (0, self.p.out_features):
                product = torch.mm(part, block)
                total = product.float() if total is None else total.add_(product)
            elif first and start == 0:
                torch.mm(part, block, out=dx)
            else:
                dx.addmm_(part, block)
        if total is not None:
            dx.copy_(total if first else total.add_(dx))

    def own_grads(
        self, x: Tensor | None, dy: Tensor, grads: ProjectionGrads, dropped: Tensor | None = None
    ) -> Tensor | None:
        """Adds the tile's part to the gradients of bias, W, A and B; returns dy B [tile, r] where it was made."""
        if grads.bias is not None:
            grads.bias += dy.sum(0, dtype=grads.bias.dtype)
        if x is None:
            return None
        if grads.weight is not None:
            _add_product(grads.weight, dy.t(), x, 1.0)
        source = x if dropped is None else dropped
        du = None
        if grads.a is not None and self.b is not None:
            du = torch.mm(dy, self.b)
            _add_product(grads.a, du.t(), source, self.scale)
        if grads.b is not None and self.a is not None:
            u = torch.mm(source, self.a.t())
            # (u^T dy)^T: on a CPU 1.5 times as fast as dy^T u, and read only once where dy is a slice.
            grads.b.t().add_(torch.mm(u.t(), dy), alpha=self.scale)
        return du


def _add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """total += alpha * left @ right; total is fp32 where the factors are 16 bits wide."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=alpha)
    else:
        total.add_(torch.mm(left, right), alpha=alpha)


def under_autocast(x: Tensor) -> tuple[Tensor, Any]:
    """x in autocast's dtype where autocast is on, and a context that keeps autocast out of our own products."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x, nullcontext()
    return x.to(torch.get_autocast_dtype(kind)), torch.autocast(kind, enabled=False)


@implements("nf4_rows_with_update", "torch")
def _nf4_rows_with_update(
    weight: NF4Tensors, start: int, stop: int, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    return rows(weight, start, stop, dtype).addmm_(b[start:stop], a, alpha=scale)
