"""NF4 weights with bitsandbytes' numbers, stored as plain tensors.

Same codes, same block of 64, same double quantisation (blocks of 256 scales, dynamic 8-bit map, offset by the mean) as
bitsandbytes, bit for bit: an adapter trained here means the same over a stock bitsandbytes base. Only the container
differs (docs/decisions/0003-nf4-storage.md): every stored tensor is of an integer type, float32 scales as their bit
pattern, so that no `.half()`, mixed-precision policy or sharding framework can change a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from bitsandbytes import functional as bnb
from torch import nn
from torch.nn import functional as F

from frugal.codecs.base import EncodedModule, chunk, refuse_absent
from frugal.codecs.nf4_codes import BLOCK, NESTED_BLOCK, block_scales, quantize_blocks

_QUANTIZE_STEP = 1 << 17  # elements quantised at a time on the CPU, a multiple of BLOCK
_WIDENED_BYTES = 16 << 20  # largest block of dense float32 rows that a product holds at a time


@dataclass(frozen=True, slots=True)
class NF4Tensors:
    """One quantised parameter. All members are plain tensors of integer types; experts are stacked in front."""

    packed: torch.Tensor
    """uint8, two 4-bit codes a byte, high nibble first: [rows, columns / 2], or [bytes, 1] where columns is odd."""
    absmax: torch.Tensor
    """[rows, columns / 64], or [blocks] where a row is no whole number of blocks. With double quantisation uint8 codes
    into the dynamic map, else int32 bit patterns of the float32 scales."""
    nested_absmax: torch.Tensor | None
    """int32 bit patterns of float32, [ceil(blocks / 256)]; None without double quantisation."""
    offset: torch.Tensor | None
    """int32 bit pattern of float32, [1]: the mean of the scales; None without double quantisation."""
    shape: tuple[int, ...]
    """(rows, columns) or (experts, rows, columns) of the dense parameter."""

    @property
    def codec(self) -> str:
        """Key in `frugal.codecs.CODECS`."""
        return NF4Codec.name

    @property
    def nbytes(self) -> int:
        """Stored bytes: codes and scales."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def scales(self) -> torch.Tensor:
        """float32 [blocks] of a matrix: the largest absolute value of each block of 64, as stored."""
        blocks = self.absmax.numel()
        return block_scales(self.absmax, self.nested_absmax, self.offset, 0, blocks)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors by name."""
        found = {name: getattr(self, name) for name in _PARTS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def refuse_absent(self, device: torch.device) -> None:
        """Raise ModelError when bytes of this parameter are not there for a product on ``device``."""
        values = torch.Size(self.shape[-2:]).numel()
        blocks = -(values // -BLOCK)
        sizes = {"packed": -(values // -2), "absmax": blocks, "nested_absmax": -(blocks // -NESTED_BLOCK), "offset": 1}
        experts = self.shape[0] if len(self.shape) == 3 else 1
        refuse_absent(self.tensors(), device, {name: size * experts for name, size in sizes.items()})

    def expert(self, index: int) -> NF4Tensors:
        """The matrix of one expert, as views: stored as if it had been quantised by itself."""
        if len(self.shape) != 3:
            raise ValueError(f"a parameter of shape {self.shape} has no experts")
        return _from_tensors({name: tensor[index] for name, tensor in self.tensors().items()}, self.shape[1:])

    def columns(self, start: int, stop: int) -> NF4Tensors:
        """Columns ``start`` to ``stop`` of a matrix, both multiples of 64: copies, their scales not quantised.

        Dequantised they give the bits of the same columns of the whole.
        """
        rows, width = self.shape
        if width % BLOCK or start % BLOCK or stop % BLOCK:
            raise ValueError(f"columns {start} to {stop} of {width} are no whole blocks of {BLOCK}")
        packed = self.packed.view(rows, width // 2)[:, start // 2 : stop // 2]
        scales = self.scales.view(rows, width // BLOCK)[:, start // BLOCK : stop // BLOCK]
        return NF4Tensors(packed.contiguous(), scales.contiguous().view(torch.int32), None, None, (rows, stop - start))

    def dequantize_rows(
        self, start: int, stop: int, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a matrix as a dense [stop - start, columns] tensor of ``dtype``.

        Fast when ``start`` falls on a block (always when columns is a multiple of 64); otherwise the block's head is
        dequantised too and cut off. ``out``, of that shape and ``dtype``, receives the rows if given.
        """
        if len(self.shape) != 2:
            raise ValueError(f"rows of a parameter of shape {self.shape}: take an expert first")
        columns = self.shape[1]
        first, last = start * columns, min(stop, self.shape[0]) * columns
        aligned = first // BLOCK * BLOCK
        stored = (self.packed, self.absmax, self.nested_absmax, self.offset, aligned)
        if out is not None and first == aligned and out.is_contiguous() and out.dtype == dtype:
            torch.ops.frugal.nf4_dequantize_into(*stored, out)
            return out
        flat: torch.Tensor = torch.ops.frugal.nf4_dequantize(*stored, last, dtype)
        rows = flat[first - aligned :].view(-1, columns)
        return rows if out is None else out.copy_(rows)

    def shard(self, rank: int, world_size: int) -> dict[str, torch.Tensor]:
        """What ``rank`` keeps: its experts of every tensor, or its rows of codes and scales."""
        if len(self.shape) == 2 and self.shape[1] % BLOCK:
            raise ValueError(f"rows of {self.shape[1]} columns are no whole blocks of {BLOCK}: they cannot be sharded")
        whole = () if len(self.shape) == 3 else _WHOLE
        return {
            name: tensor if name in whole else chunk(tensor, rank, world_size)
            for name, tensor in self.tensors().items()
        }


def _from_tensors(parts: dict[str, torch.Tensor], shape: tuple[int, ...]) -> NF4Tensors:
    return NF4Tensors(parts["packed"], parts["absmax"], parts.get("nested_absmax"), parts.get("offset"), shape)


_PARTS = ("packed", "absmax", "nested_absmax", "offset")
_WHOLE = ("nested_absmax", "offset")  # of a matrix: 4 bytes for 16384 weights, which every rank keeps


@dataclass(frozen=True)
class NF4Codec:
    """NF4 in blocks of 64; ``double``: the scales are quantised too."""

    double: bool = True
    name: ClassVar[str] = "nf4"

    def empty(self, shape: tuple[int, ...], device: torch.device | str | None) -> NF4Tensors:
        """Uninitialised storage for a parameter of ``shape``."""
        *experts, rows, columns = shape
        count = rows * columns
        blocks = -(count // -BLOCK)
        packed = (rows, columns // 2) if columns % 2 == 0 else (-(count // -2), 1)
        absmax = (rows, columns // BLOCK) if columns % BLOCK == 0 else (blocks,)

        def storage(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return torch.empty(*experts, *sizes, dtype=dtype, device=device)

        return NF4Tensors(
            storage(torch.uint8, *packed),
            storage(torch.uint8 if self.double else torch.int32, *absmax),
            storage(torch.int32, -(blocks // -NESTED_BLOCK)) if self.double else None,
            storage(torch.int32, 1) if self.double else None,
            tuple(shape),
        )

    def nbytes(self, shape: tuple[int, ...], stored: torch.dtype) -> int:
        """Bytes of codes and scales."""
        return self.empty(shape, "meta").nbytes

    def scratch_bytes(self, shape: tuple[int, ...], stored: torch.dtype) -> int:
        """Bytes of the float32 scales of one matrix and two copies of them."""
        return 3 * (shape[-2] * shape[-1] // BLOCK) * 4

    def encode(self, weight: torch.Tensor) -> NF4Tensors:
        """Quantise ``weight`` (any float dtype, any strides): each expert gives the bits that it gives by itself."""
        weight = weight.detach()
        if weight.ndim == 2:
            return quantize_nf4(weight if weight.dtype.itemsize <= 4 else weight.float(), self.double)
        stacked = self.empty(tuple(weight.shape), weight.device)
        for index, matrix in enumerate(weight):
            for name, tensor in self.encode(matrix).tensors().items():
                getattr(stacked, name)[index] = tensor
        return stacked

    def gather(self, shards: list[dict[str, torch.Tensor]], shape: tuple[int, ...]) -> NF4Tensors:
        """Join the shards of all ranks: the same bytes as before `NF4Tensors.shard`."""
        whole = () if len(shape) == 3 else _WHOLE
        parts = {
            name: tensor if name in whole else torch.cat([shard[name] for shard in shards])
            for name, tensor in shards[0].items()
        }
        return _from_tensors(parts, tuple(shape))

    def merge_source(self, weight: torch.Tensor) -> NF4Tensors:
        """The quantised weight, which the adapter was trained over."""
        return self.encode(weight)


def quantize_nf4(weight: torch.Tensor, double: bool = True) -> NF4Tensors:
    """Quantise ``weight`` [rows, columns] (float32, float16 or bfloat16; any strides): bitsandbytes' numbers.

    Any number of elements works: the last block's scale is taken over its real elements alone.
    """
    like = NF4Codec(double).empty(tuple(weight.shape), "meta")
    packed, absmax = _codes_and_scales(weight.detach().contiguous().reshape(-1))
    nested = offset = None
    if double:
        offset = absmax.mean()
        absmax, state = bnb.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
        nested, offset = state.absmax.view(torch.int32), offset.reshape(1).view(torch.int32)
    else:
        absmax = absmax.view(torch.int32)
    return NF4Tensors(packed.view(like.packed.shape), absmax.view(like.absmax.shape), nested, offset, like.shape)


def _codes_and_scales(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 packed codes and float32 scales of a flat tensor.

    On the CPU in pieces that fit the cache: bitsandbytes' form there makes several float32 copies of its whole input.
    """
    if flat.device.type != "cpu":
        codes, scales = torch.ops.bitsandbytes.quantize_4bit(flat, BLOCK, "nf4", torch.uint8)
        return codes.view(-1), scales
    packed = torch.empty(-(flat.numel() // -2), dtype=torch.uint8)
    absmax = torch.empty(-(flat.numel() // -BLOCK), dtype=torch.float32)
    for start in range(0, flat.numel(), _QUANTIZE_STEP):
        piece = flat[start : start + _QUANTIZE_STEP]
        if piece.numel() % BLOCK == 0:
            codes, scales = quantize_blocks(piece)
        else:
            codes, scales = torch.ops.bitsandbytes.quantize_4bit(piece, BLOCK, "nf4", torch.uint8)
        packed[start // 2 : start // 2 + codes.numel()] = codes.view(-1)
        absmax[start // BLOCK : start // BLOCK + scales.numel()] = scales
    return packed, absmax


def dequantize_nf4(nf4: NF4Tensors, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The dense [rows, columns] matrix, computed in float32 and rounded once to ``dtype``."""
    return nf4.dequantize_rows(0, nf4.shape[0], dtype)


class NF4Linear(nn.Linear, EncodedModule):
    """A frozen linear layer whose weight is NF4. `nn.Linear` in name and sizes, so PEFT injects into it as it is.

    ``weight`` holds the packed codes and ``absmax`` the scales: both frozen Parameters whose dim 0 is the output row
    (where in_features is a multiple of 64), so that FSDP2 shards them without touching a bit. The nested scales, 4
    bytes for 16384 weights, are buffers. The dense matrix exists only inside forward and backward.
    """

    codec: NF4Codec
    encoded_parts = {"weight": ("weight", "absmax", "nested_absmax", "offset")}  # noqa: RUF012
    absmax: nn.Parameter
    nested_absmax: torch.Tensor | None
    offset: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        double: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``dtype`` is that of the bias. Codes and scales start undefined: fill them with `encode_`."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.codec = in_features, out_features, NF4Codec(double)
        self._store(self.codec.empty((out_features, in_features), device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, double: bool = True) -> NF4Linear:
        """Quantise an ordinary linear layer. The bias Parameter is taken over."""
        new = cls(linear.in_features, linear.out_features, bias=False, double=double, device="meta")
        new.bias = linear.bias
        new.encode_("weight", linear.weight)
        return new.train(linear.training)

    def encode_(self, part: str, weight: torch.Tensor) -> None:
        """Replace the stored matrix by ``weight`` [out_features, in_features], quantised where ``weight`` lies."""
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"weight is {tuple(weight.shape)}, expected {(self.out_features, self.in_features)}")
        self._store(self.codec.encode(weight))

    def _store(self, nf4: NF4Tensors) -> None:
        self.weight = nn.Parameter(nf4.packed, requires_grad=False)
        self.absmax = nn.Parameter(nf4.absmax, requires_grad=False)
        self.register_buffer("nested_absmax", nf4.nested_absmax)
        self.register_buffer("offset", nf4.offset)

    def encoded(self, part: str = "weight") -> NF4Tensors:
        """The stored tensors (references, no copies)."""
        return NF4Tensors(
            self.weight, self.absmax, self.nested_absmax, self.offset, (self.out_features, self.in_features)
        )

    @property
    def W_q(self) -> torch.Tensor:
        """PEFT asks for this name to learn that a module has its own `dequantize` (DoRA needs the dense weight)."""
        return self.weight

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight [out_features, in_features]."""
        return dequantize_nf4(self.encoded(), dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features] in the input's dtype (or autocast's)."""
        device = input.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        out: torch.Tensor = _NF4Product.apply(
            input, self.weight, self.absmax, self.nested_absmax, self.offset, (self.out_features, self.in_features)
        )
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        bits = "4-bit NF4, double quantised" if self.codec.double else "4-bit NF4"
        return f"{super().extra_repr()}, {bits}"


def _row_blocks(shape: tuple[int, ...], dtype: torch.dtype, block_bytes: int = _WIDENED_BYTES) -> list[tuple[int, int]]:
    rows, columns = shape
    step = max(BLOCK, block_bytes // (columns * dtype.itemsize) // BLOCK * BLOCK)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


class _NF4Product(torch.autograd.Function):
    """y = x W^T for a frozen NF4 matrix W. Saves references to the packed tensors, never x and never W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        absmax: torch.Tensor,
        nested_absmax: torch.Tensor | None,
        offset: torch.Tensor | None,
        shape: tuple[int, int],
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, absmax, nested_absmax, offset)
        ctx.shape = shape
        nf4 = NF4Tensors(packed, absmax, nested_absmax, offset, shape)
        nf4.refuse_absent(x.device)
        blocks = _row_blocks(shape, x.dtype)
        if len(blocks) == 1:
            return F.linear(x, dequantize_nf4(nf4, x.dtype))
        flat = x.reshape(-1, shape[1])
        out = x.new_empty(flat.shape[0], shape[0])
        for start, stop in blocks:
            torch.mm(flat, nf4.dequantize_rows(start, stop, x.dtype).t(), out=out[:, start:stop])
        return out.view(*x.shape[:-1], shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        """dX = dY W. In 16 bits the matrix is taken whole: summing over blocks of rows would round in between."""
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        packed, absmax, nested_absmax, offset = ctx.saved_tensors
        nf4 = NF4Tensors(packed, absmax, nested_absmax, offset, ctx.shape)
        nf4.refuse_absent(grad.device)
        flat = grad.reshape(-1, ctx.shape[0])
        blocks = _row_blocks(ctx.shape, grad.dtype) if grad.dtype == torch.float32 else [(0, ctx.shape[0])]
        grad_x = None
        for start, stop in blocks:
            dense = nf4.dequantize_rows(start, stop, grad.dtype)
            if grad_x is None:
                grad_x = torch.mm(flat[:, start:stop], dense)
            else:
                grad_x.addmm_(flat[:, start:stop], dense)
        assert grad_x is not None
        return grad_x.view(*grad.shape[:-1], ctx.shape[1]), None, None, None, None, None
