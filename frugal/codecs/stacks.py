"""Stacks of experts whose matrices were encoded in pieces: gate and up apart, though one parameter holds both.

Checkpoints cut them differently (a matrix for gate and one for up of each expert, or all in one tensor). Encoding the
pieces apart gives the same numbers from either, and lets a checkpoint be read and merged one of its matrices at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from frugal.codecs.base import Codec, EncodedWeight


@dataclass(frozen=True, slots=True)
class Piece:
    """Which part of a stack one matrix of a checkpoint is."""

    expert: int
    part: int = 0
    parts: int = 1
    """Matrices that make one expert's, below each other, all of one shape."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model's stack of experts is encoded."""

    parts: int = 1
    """Matrices, below each other, that one expert's is encoded as."""
    transposed: bool = False
    """Rows of the checkpoint's matrices are inputs; encoded ones have outputs as rows."""

    def through(self, codec: Codec, matrix: Tensor) -> Tensor:
        """The float32 numbers that encoding leaves of one expert's matrix, as the checkpoint has it."""
        pieces = (matrix.t() if self.transposed else matrix).chunk(self.parts)
        dense = [codec.merge_source(one).dequantize_rows(0, one.shape[0], torch.float32) for one in pieces]
        whole = torch.cat(dense)
        return whole.t() if self.transposed else whole


@dataclass(frozen=True, slots=True)
class Pieces:
    """A matrix whose rows are those of several encoded ones, one below the other."""

    matrices: tuple[EncodedWeight, ...]
    """All of one shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns)."""
        rows, columns = self.matrices[0].shape
        return rows * len(self.matrices), columns

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def codec(self) -> str:
        """Key in `frugal.codecs.CODECS`."""
        return self.matrices[0].codec

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by number of the matrix and name."""
        return {f"{i}.{name}": t for i, m in enumerate(self.matrices) for name, t in m.tensors().items()}

    def expert(self, index: int) -> EncodedWeight:
        """Raises ``ValueError``: this is the matrix of one."""
        raise ValueError(f"a parameter of shape {self.shape} has no experts")

    def shard(self, rank: int, world_size: int) -> dict[str, Tensor]:
        """Raises ``ValueError``: a stack is cut between experts."""
        raise ValueError("the matrix of one expert is not sharded: shard the stack")

    def within(self, start: int, stop: int) -> list[tuple[EncodedWeight, int, int]]:
        """(matrix, its first row, last row + 1), in order, that make rows ``start`` to ``stop``."""
        rows = self.matrices[0].shape[0]
        cut = [(m, max(start - i * rows, 0), min(stop - i * rows, rows)) for i, m in enumerate(self.matrices)]
        return [(matrix, lo, hi) for matrix, lo, hi in cut if lo < hi]

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` as a dense [stop - start, columns] tensor, in ``out`` if given."""
        found = [matrix.dequantize_rows(lo, hi, dtype) for matrix, lo, hi in self.within(start, stop)]
        rows = found[0] if len(found) == 1 else torch.cat(found)
        return rows if out is None else out.copy_(rows)


@dataclass(frozen=True, slots=True)
class PiecedStack:
    """An encoded [experts, rows, columns] whose experts are ``parts`` encoded matrices each."""

    pieces: EncodedWeight
    """[experts * parts, rows / parts, columns]: an expert's pieces beside each other."""
    parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, rows, columns)."""
        count, rows, columns = self.pieces.shape
        return count // self.parts, rows * self.parts, columns

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.pieces.nbytes

    @property
    def codec(self) -> str:
        """Key in `frugal.codecs.CODECS`."""
        return self.pieces.codec

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name; dimension 0 counts pieces."""
        return self.pieces.tensors()

    def expert(self, index: int) -> EncodedWeight:
        """The matrix of one expert, as views."""
        if self.parts == 1:
            return self.pieces.expert(index)
        first = index * self.parts
        return Pieces(tuple(self.pieces.expert(i) for i in range(first, first + self.parts)))

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Raises ``ValueError``: take an expert first."""
        raise ValueError(f"rows of a parameter of shape {self.shape}: take an expert first")

    def shard(self, rank: int, world_size: int) -> dict[str, Tensor]:
        """What ``rank`` keeps: its pieces of every tensor."""
        return self.pieces.shard(rank, world_size)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All of it, [experts, rows, columns]."""
        count, rows, _ = self.pieces.shape
        found = torch.stack([self.pieces.expert(i).dequantize_rows(0, rows, dtype) for i in range(count)])
        return found.view(self.shape)
