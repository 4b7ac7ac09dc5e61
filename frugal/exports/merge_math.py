"""Arithmetic of a merge, a block of rows at a time in fp32: base rows + scale * B A, or DoRA's rescaling of them.

LoRA (https://arxiv.org/abs/2106.09685): W' = W + s B A with s = lora_alpha / r, or lora_alpha / sqrt(r) (rsLoRA,
https://arxiv.org/abs/2312.03732). DoRA (https://arxiv.org/abs/2402.09353): W' = m (W + s B A) / ||W + s B A|| with the
norm over the input dimension. Scales come from PEFT's own layers, so patterns of ranks and alphas are PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt

import torch

from frugal.codecs import CODECS, Cut, EncodedWeight
from frugal.tensor_files import StoredTensor

ROW_BYTES = 1 << 20
"""Stored size of a block of rows; about ten fp32 copies of it exist while it is updated and measured."""


@dataclass(slots=True)
class Difference:
    """Sums of squares over all weights with a low-rank update; what a report says about the choice of base weights."""

    weight: float = 0.0
    quantization: float = 0.0
    delta: float = 0.0
    rounding: float = 0.0
    max_quantization: float = 0.0

    def report(self) -> dict[str, float]:
        """Relative Frobenius norms: of the quantisation error, the update and what rounding took of the update."""
        return {
            "quantization_error_over_weights": _ratio(self.quantization, self.weight),
            "update_over_weights": _ratio(self.delta, self.weight),
            "rounding_error_over_update": _ratio(self.rounding, self.delta),
            "max_abs_quantization_error": self.max_quantization,
        }


def _ratio(part: float, whole: float) -> float:
    return sqrt(part / whole) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoraUpdate:
    """The low-rank update of one weight matrix."""

    a: StoredTensor
    """[r, in_features]; [r, num_embeddings] for an embedding"""
    b: StoredTensor
    """[out_features, r]; [embedding_dim, r] for an embedding"""
    scaling: float
    transposed: bool
    """Rows of the stored weight are in_features: an embedding, or a Conv1D (`fan_in_fan_out`)."""
    magnitude: StoredTensor | None = None
    """[out_features], DoRA's m"""


@dataclass(slots=True)
class WeightPlan:
    """How one output weight is made of the base's tensor and the adapter."""

    stored: StoredTensor | None
    """The base's tensor; None for one that exists in the adapter alone."""
    shape: tuple[int, ...]
    replaced: StoredTensor | None = None
    """Trained whole (modules_to_save, resized embeddings, biases): takes the place of ``stored``."""
    update: LoraUpdate | None = None
    rows: tuple[list[int], StoredTensor] | None = None
    """Token ids and their rows [tokens, hidden] (`trainable_token_indices`)."""
    bias_update: tuple[StoredTensor, float] | None = None
    """For a bias: `lora_B.bias` and its scale (`lora_bias=True`)."""
    quantized: bool = False
    """The run held this weight in NF4."""
    cut: Cut | None = None
    """Of a stack of experts: how it was encoded."""

    @property
    def touched(self) -> bool:
        """The adapter changes this weight."""
        return any(part is not None for part in (self.replaced, self.update, self.rows, self.bias_update))

    def same_as(self, other: WeightPlan) -> bool:
        """Both come out equal when made from the same base tensor."""
        mine, theirs = ((plan.update, plan.shape, plan.quantized) for plan in (self, other))
        ids, rows = self.rows or (None, None)
        other_ids, other_rows = other.rows or (None, None)
        same = mine == theirs and ids == other_ids
        return same and _same_values(self.replaced, other.replaced) and _same_values(rows, other_rows)


_COMPARED_ROWS = 4096


def _same_values(one: StoredTensor | None, other: StoredTensor | None) -> bool:
    """Whether two stored tensors are equal: PEFT writes a tied table that is trained whole under both its names."""
    if one is None or other is None or one == other:
        return one == other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    starts = range(0, one.rows, _COMPARED_ROWS)
    blocks = ((start, min(start + _COMPARED_ROWS, one.rows)) for start in starts)
    return all(torch.equal(one.read(*block), other.read(*block)) for block in blocks)


@dataclass(slots=True)
class Maker:
    """Makes rows of output weights; shared settings and the running measurement."""

    dequantized: bool
    """Add the update to the dequantised weight, else to the original one."""
    double_quant: bool
    measure: bool
    """Compare with the quantised weight although the original is used."""
    difference: Difference = field(default_factory=Difference)

    def producer(self, plan: WeightPlan, dtype: torch.dtype) -> Callable[[], Iterator[torch.Tensor]]:
        """A function that yields the blocks of rows of the finished weight in ``dtype``."""

        def make() -> Iterator[torch.Tensor]:
            yield from self._make(plan, dtype)

        return make

    def _make(self, plan: WeightPlan, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        if not plan.touched and not (plan.quantized and self.dequantized):
            assert plan.stored is not None
            for _, block in plan.stored.blocks():
                yield block.to(dtype)
            return
        made = 0
        for start, block in self._updated(plan):
            stop = made = start + block.shape[0] if block.dim() else 1
            if plan.rows is not None:
                _overwrite(block, start, stop, plan.rows)
            out = block.to(dtype)
            if plan.update is not None and out.dtype != torch.float32:
                self.difference.rounding += _square(out.float() - block)
            yield out
        if made < plan.shape[0] and plan.rows is not None:  # rows that the run added behind the base's table
            extra = torch.full((plan.shape[0] - made, *plan.shape[1:]), float("nan"))
            _overwrite(extra, made, plan.shape[0], plan.rows)
            yield extra.to(dtype)

    def _updated(self, plan: WeightPlan) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, fp32 rows): replaced, or base rows with the update and the measurement taken."""
        if plan.replaced is not None:
            for start, block in plan.replaced.blocks():
                yield start, block.float()
            return
        assert plan.stored is not None
        if plan.bias_update is not None:
            bias, scale = plan.bias_update
            yield 0, plan.stored.read().float() + bias.read().float() * scale
            return
        if plan.cut is not None:  # adapters of experts are refused, so that these are the run's numbers alone
            codec = CODECS["nf4"](torch.float32, self.double_quant)
            for expert in range(plan.stored.rows):
                yield expert, plan.cut.through(codec, plan.stored.read(expert, expert + 1)[0])[None]
            return
        held = None
        if plan.quantized and (self.dequantized or self.measure):
            held = CODECS["nf4"](torch.float32, self.double_quant).merge_source(plan.stored.read())
        base = held if self.dequantized else None
        lora = _Applied(plan.update, plan.stored, base) if plan.update is not None else None
        for start, block in plan.stored.blocks(ROW_BYTES):
            original = block.float()
            rows = slice(start, start + original.shape[0])
            source = _dense(base, rows) if base is not None else original
            result = lora.rows(source, rows) if lora is not None else source
            if lora is not None:
                self.difference.weight += _square(original)
                self.difference.delta += _square(result - source)
            if lora is not None and held is not None:
                error = (source if base is not None else _dense(held, rows)) - original
                self.difference.quantization += _square(error)
                self.difference.max_quantization = max(self.difference.max_quantization, float(error.abs().max()))
            yield start, result.clone() if result is source else result


class _Applied:
    """A LoRA update with its matrices read: A [r, in], B [out, r] in fp32."""

    def __init__(self, update: LoraUpdate, stored: StoredTensor, base: EncodedWeight | None) -> None:
        self.update = update
        self.a, self.b = update.a.read().float(), update.b.read().float()
        self.magnitude = update.magnitude.read().float().flatten() if update.magnitude is not None else None
        self.norm: torch.Tensor | None = None
        if self.magnitude is not None and update.transposed:  # the norm runs over rows: one pass beforehand
            total = torch.zeros(self.b.shape[0])
            for start, block in stored.blocks(ROW_BYTES):
                rows = slice(start, start + block.shape[0])
                source = _dense(base, rows) if base is not None else block.float()
                total += (source + self._delta(rows)).square().sum(0)
            self.norm = total.sqrt()

    def _delta(self, rows: slice) -> torch.Tensor:
        low_rank = (self.b @ self.a[:, rows]).T if self.update.transposed else self.b[rows] @ self.a
        return low_rank * self.update.scaling

    def rows(self, source: torch.Tensor, rows: slice) -> torch.Tensor:
        """Finished fp32 rows of ``source`` [rows, columns]."""
        result = source + self._delta(rows)
        if self.magnitude is None:
            return result
        if self.norm is not None:
            return result * (self.magnitude / self.norm)
        norm: torch.Tensor = torch.linalg.norm(result, dim=1)
        return result * (self.magnitude[rows] / norm).unsqueeze(1)


def _dense(base: EncodedWeight, rows: slice) -> torch.Tensor:
    dense: torch.Tensor = base.dequantize_rows(rows.start, rows.stop, torch.float32)
    return dense


def _overwrite(block: torch.Tensor, start: int, stop: int, rows: tuple[list[int], StoredTensor]) -> None:
    ids, stored = rows
    for position, token in enumerate(ids):
        if start <= token < stop:
            block[token - start] = stored.read(position, position + 1)[0].float()


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))
