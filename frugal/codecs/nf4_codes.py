"""The dequantisation operator `frugal::nf4_dequantize` and the tables it reads.

A `torch.library` operator, so that fake and meta tensors pass through it: a planner runs a model without memory. Where
a plan for the CPU is metered, the fake tensors go through the very branch that this machine takes (`frugal.meter`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from bitsandbytes import functional as bnb
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

BLOCK = 64
"""Elements that share one scale (absmax)."""
NESTED_BLOCK = 256
"""Scales that share one scale of their own, with double quantisation."""

# Bytes gathered at a time on the CPU: the int32 indices of one step stay in the second-level cache (256 kB).
_CPU_STEP = 1 << 16
_BITSANDBYTES_WRITES = (torch.float32, torch.float16, torch.bfloat16)  # of others it returns memory as it found it


@functools.cache
def nf4_code(device: torch.device) -> torch.Tensor:
    """The 16 NF4 values, float32, in rising order (QLoRA, arXiv 2305.14314, appendix E); bitsandbytes' own table."""
    with _disable_current_modes():  # a plan that asks first must not leave a table without values behind
        code: torch.Tensor = bnb.get_4bit_type("nf4", device=device)
        return code.to(torch.float32)


@functools.cache
def nested_code(device: torch.device) -> torch.Tensor:
    """The 256 values of the dynamic 8-bit map that stores scales (arXiv 1511.04561), float32."""
    with _disable_current_modes():
        code: torch.Tensor = bnb.create_dynamic_map()
        return code.to(device=device, dtype=torch.float32)


@functools.cache
def pair_table() -> torch.Tensor:
    """complex64 [256] on the CPU: entry b holds the two float32 values of byte b (high nibble first), moved as one."""
    with _disable_current_modes():
        code, byte = nf4_code(torch.device("cpu")), torch.arange(256)
        return torch.complex(code[byte >> 4], code[byte & 15])


@functools.cache
def _bitsandbytes_is_faster() -> bool:
    """bitsandbytes has an AVX-512 kernel (2x our gather); without AVX-512 its kernel takes 3x as long as the gather."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def block_scales(
    absmax: torch.Tensor, nested_absmax: torch.Tensor | None, offset: torch.Tensor | None, start: int, stop: int
) -> torch.Tensor:
    """float32 scales of blocks ``start`` to ``stop``, from the stored bytes (see `frugal.codecs.nf4.NF4Tensors`)."""
    stored = absmax.reshape(-1)[start:stop]
    if nested_absmax is None or offset is None:
        return stored.view(torch.float32)
    scales = torch.index_select(nested_code(absmax.device), 0, stored.to(torch.int32))
    first = start // NESTED_BLOCK
    nested = nested_absmax.view(torch.float32)[first : -(stop // -NESTED_BLOCK)].repeat_interleave(NESTED_BLOCK)
    lead = start - first * NESTED_BLOCK
    # Product and sum are rounded one after the other, as bitsandbytes does.
    return scales.mul_(nested[lead : lead + scales.numel()]).add_(offset.view(torch.float32))


@functools.cache
def _nf4_bounds() -> tuple[float, ...]:
    """Where one NF4 value ends and the next begins: the 15 midpoints."""
    code = nf4_code(torch.device("cpu"))
    return tuple(((code[:-1] + code[1:]) / 2).tolist())


def quantize_blocks(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole blocks of 64 on the CPU: uint8 [n / 2] packed codes and float32 [n / 64] scales.

    The code of a value is the number of midpoints below it. Fifteen comparisons over bytes take 10 ns a value where the
    binary search that bitsandbytes uses takes 25; the numbers are the same (tests/codecs).
    """
    blocks = flat.to(torch.float32).view(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1)
    scaled = blocks.mul(absmax.clamp(min=1e-38).reciprocal()[:, None]).clamp_(-1, 1).view(-1)
    codes = torch.zeros(scaled.numel(), dtype=torch.uint8)
    for bound in _nf4_bounds():
        codes += scaled > bound
    return (codes[::2] << 4) | codes[1::2], absmax


_library = torch.library.Library("frugal", "FRAGMENT")
_STORED = "Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? offset, int start"
_library.define(f"nf4_dequantize({_STORED}, int stop, ScalarType dtype) -> Tensor")
_library.define(f"nf4_dequantize_into({_STORED}, Tensor(a!) out) -> ()")


def _dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    offset: torch.Tensor | None,
    start: int,
    stop: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Elements ``start`` (a multiple of 64) to ``stop`` of the flattened matrix, as a [stop - start] tensor."""
    if dtype not in _BITSANDBYTES_WRITES:
        return _dequantize(packed, absmax, nested_absmax, offset, start, stop, torch.float32).to(dtype)
    count = stop - start
    scales = block_scales(absmax, nested_absmax, offset, start // BLOCK, -(stop // -BLOCK))
    codes = packed.reshape(-1)[start // 2 : -(stop // -2)]
    if packed.device.type != "cpu" or (count % 2 == 0 and _bitsandbytes_is_faster()):
        flat: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", [count], dtype)
        return flat.reshape(-1)
    return _gather(codes, scales, torch.empty(count, dtype=dtype))


def _dequantize_into(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    offset: torch.Tensor | None,
    start: int,
    out: torch.Tensor,
) -> None:
    """The elements from ``start`` (a multiple of 64) on, as many as contiguous ``out`` takes, written to it."""
    count = out.numel()
    stop = start + count
    scales = block_scales(absmax, nested_absmax, offset, start // BLOCK, -(stop // -BLOCK))
    codes = packed.reshape(-1)[start // 2 : -(stop // -2)]
    if packed.device.type == "cpu":
        _gather(codes, scales, out.view(-1))
    else:
        torch.ops.bitsandbytes.dequantize_4bit.out(codes, scales, BLOCK, "nf4", [count], out.dtype, out=out.view(-1))


def _gather(codes: torch.Tensor, scales: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """CPU: two values a byte from the pair table, scaled in float32, then cast; same numbers as bitsandbytes."""
    table, count, dtype = pair_table(), result.numel(), result.dtype
    steps: Sequence[int] = range(0, codes.numel(), _CPU_STEP)
    if isinstance(codes, FakeTensor):  # a plan: the steps between allocate what the first does
        steps = [*steps[:1], *steps[1:][-1:]]
    for first in steps:
        last = min(first + _CPU_STEP, codes.numel())
        begin, end, blocks = 2 * first, min(2 * last, count), -((last - first) // -(BLOCK // 2))
        in_place = dtype == torch.float32 and end - begin == blocks * BLOCK
        part = result[begin:end] if in_place else torch.zeros(blocks * BLOCK)
        pairs = part.view(torch.complex64)[: last - first]
        torch.index_select(table, 0, codes[first:last].to(torch.int32), out=pairs)
        part.view(-1, BLOCK).mul_(scales[begin // BLOCK :][:blocks, None])
        if not in_place:
            result[begin:end] = part[: end - begin]
    return result


for _key in ("CPU", "CUDA"):
    _library.impl("nf4_dequantize", _dequantize, _key)
    _library.impl("nf4_dequantize_into", _dequantize_into, _key)


def _dequantize_fake(packed: torch.Tensor, *stored: Any) -> torch.Tensor:
    *_, start, stop, dtype = stored
    return packed.new_empty((stop - start,), dtype=dtype)


torch.library.register_fake("frugal::nf4_dequantize", _dequantize_fake, lib=_library)
torch.library.register_fake("frugal::nf4_dequantize_into", lambda *stored: None, lib=_library)
