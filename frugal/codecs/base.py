"""The interface of a codec: how frozen parameters of two or three dimensions are stored.

A codec turns a dense parameter, [rows, columns] or [experts, rows, columns], into an `EncodedWeight` and says what that
takes. Modules that keep parameters encoded are `EncodedModule`s. Loading, planning, sharding and merging walk over
these, not over particular layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from frugal.codecs.stacks import Piece
from frugal.errors import ModelError


@runtime_checkable
class EncodedWeight(Protocol):
    """One stored parameter. Operations take it in place of a dense tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the dense parameter: (rows, columns) or (experts, rows, columns)."""
        ...

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        ...

    @property
    def codec(self) -> str:
        """Key in `frugal.codecs.CODECS`: implementations of the operation `dequantize` ask for it."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name; the first one holds the values."""
        ...

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` of a matrix as a dense [stop - start, columns] tensor, in ``out`` if given.

        Raises ``ValueError`` for a parameter of three dimensions: take an `expert` first.
        """
        ...

    def expert(self, index: int) -> EncodedWeight:
        """The matrix of one expert, as views."""
        ...

    def shard(self, rank: int, world_size: int) -> dict[str, Tensor]:
        """What ``rank`` keeps: views of its rows (or experts) of each tensor that is sharded, the others whole.

        Dimension 0 is cut as `torch.chunk` (and FSDP2) cuts it. Raises ``ValueError`` where a cut would split a block.
        """
        ...


class Codec(Protocol):
    """One way of storing parameters, with its settings."""

    @property
    def name(self) -> str:
        """Key in `frugal.codecs.CODECS`."""
        ...

    def nbytes(self, shape: tuple[int, ...], stored: torch.dtype) -> int:
        """Bytes in memory of a parameter that a checkpoint holds in dtype ``stored``."""
        ...

    def scratch_bytes(self, shape: tuple[int, ...], stored: torch.dtype) -> int:
        """Bytes of the temporaries of `encode`."""
        ...

    def encode(self, weight: Tensor) -> EncodedWeight:
        """Store ``weight``, of any float dtype, on its own device. An expert's blocks never cross into the next."""
        ...

    def gather(self, shards: list[dict[str, Tensor]], shape: tuple[int, ...]) -> EncodedWeight:
        """Join what `EncodedWeight.shard` gave to all ranks: the same bytes as before."""
        ...

    def merge_source(self, weight: Tensor) -> EncodedWeight:
        """What an adapter was trained over where the base was stored by this codec: the base of an exact merge."""
        ...


class EncodedModule:
    """Mixin of an `nn.Module` that keeps frozen parameters encoded."""

    codec: Codec
    encoded_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Name of a parameter in a checkpoint -> names of the parameters and buffers that store it."""

    def encode_(self, part: str, weight: Tensor) -> None:
        """Replace the stored parameter ``part`` by dense ``weight``, encoded where ``weight`` lies."""
        raise NotImplementedError

    def encode_piece_(self, part: str, piece: Piece, matrix: Tensor) -> None:
        """Encode one matrix of a stack of experts ``part``; the others stay as they are."""
        raise NotImplementedError

    def encoded(self, part: str) -> EncodedWeight:
        """The stored parameter ``part`` (references, no copies)."""
        raise NotImplementedError

    def dense(self, part: str, dtype: torch.dtype) -> Tensor:
        """The parameter ``part`` as a checkpoint has it."""
        encoded = self.encoded(part)
        return encoded.dequantize_rows(0, encoded.shape[0], dtype)


def encoded_parts(module: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """`EncodedModule.encoded_parts` of any module: empty for one that stores nothing encoded."""
    return module.encoded_parts if isinstance(module, EncodedModule) else {}


def chunk(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """The rows of ``rank``, cut as `torch.chunk` cuts: ceil(rows / world_size) each, the last ranks fewer or none."""
    step = -(tensor.shape[0] // -world_size)
    return tensor[min(rank * step, tensor.shape[0]) : (rank + 1) * step]


def refuse_absent(tensors: Mapping[str, Tensor], device: torch.device, values: Mapping[str, int] | None = None) -> None:
    """Raise ModelError when a tensor that a product on ``device`` reads has no bytes, or not as many ``values``.

    torch reads what happens to lie in memory then: a result like any other, and nothing raised. Absent is a tensor on
    the meta device, one whose storage was freed, and one element that stands for all of them.
    """
    if device.type == "meta":  # a plan: nothing is read
        return
    for name, tensor in tensors.items():
        count = tensor.numel()
        wanted = count if values is None else values[name]
        # Only plain tensors have a storage of their own: not fake ones of a plan, not DTensor.
        stored = tensor.untyped_storage().nbytes() if type(tensor) in (Tensor, nn.Parameter) else None
        if tensor.device.type == "meta":
            what = "is on the meta device, without memory"
        elif count != wanted:
            what = f"has {count} of {wanted} values"
        elif stored is not None and stored < count * tensor.itemsize:
            what = f"has {stored} of {count * tensor.itemsize} bytes"
        else:
            continue
        raise ModelError(
            f"A weight that is not there was used: its tensor `{name}` {what}. Load the model with frugal.load, or "
            "fill the layer (NF4Linear.encode_) before it is called."
        )
