"""NF4 dequantisation has bitsandbytes' bits; the fused low-rank update is within the tolerance rule."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional as bnb
from torch import Tensor

from frugal.codecs.nf4 import NF4Tensors, dequantize_nf4, quantize_nf4
from frugal.codecs.nf4_codes import nested_code, nf4_code
from frugal.ops.weights.triton import Nf4Parts, dequantize, prepare_dequantize_lora
from tests.kernels.support import KernelFault, bits_equal, checked, close_to_exact

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parts_of(nf4: NF4Tensors) -> Nf4Parts:
    nested = None if nf4.nested_absmax is None else nested_code(CPU)
    return Nf4Parts(nf4.packed, nf4.absmax, nf4.nested_absmax, nf4.offset, nf4_code(CPU), nested)


def quantized(rows: int, columns: int, double: bool, seed: int = 0) -> NF4Tensors:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.linspace(0.1, 3, rows)[:, None]
    return quantize_nf4(weight, double)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(9, 128), (7, 91), (3, 65), (1, 1), (300, 64)])
def test_bits_of_bitsandbytes(rows: int, columns: int, dtype: torch.dtype, double: bool) -> None:
    nf4 = quantized(rows, columns, double)
    with checked():
        got = dequantize(parts_of(nf4), 0, rows * columns, dtype)
    bits_equal(got.view(rows, columns), dequantize_nf4(nf4, dtype))


@pytest.mark.parametrize("compress", [True, False])
def test_bits_of_bitsandbytes_own_storage(compress: bool) -> None:
    weight = torch.randn(320, 64, generator=torch.Generator().manual_seed(1))
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=compress)
    nested = offset = None
    absmax = state.absmax if compress else state.absmax.view(torch.int32)
    if compress:
        nested, offset = state.state2.absmax.view(torch.int32), state.offset.reshape(1).view(torch.int32)
    code = None if not compress else state.state2.code
    with checked():
        got = dequantize(Nf4Parts(packed, absmax, nested, offset, state.code, code), 0, weight.numel(), torch.float32)
    bits_equal(got.view_as(weight), bnb.dequantize_4bit(packed, state))


@pytest.mark.parametrize("double", [True, False])
def test_blocks_of_rows(double: bool) -> None:
    nf4 = quantized(600, 64, double)  # scales of blocks 256 and 512 begin new nested scales
    dense = dequantize_nf4(nf4, torch.float32).flatten()
    for start, stop in ((64, 128), (64 * 250, 64 * 270), (64 * 511, 64 * 600), (128, 131)):
        with checked():
            got = dequantize(parts_of(nf4), start, stop, torch.float32)
        bits_equal(got, dense[start:stop])
    with pytest.raises(ValueError, match="multiples of 64"):
        dequantize(parts_of(nf4), 63, 128, torch.float32)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bm", "bn"), [(16, 128), (64, 64)])
def test_update_of_low_rank(dtype: torch.dtype, double: bool, bm: int, bn: int) -> None:
    rows, columns, rank, first = 45, 192, 20, 5
    nf4 = quantized(rows, columns, double)
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(rank, columns, generator=generator).to(dtype)
    b = torch.randn(rows, rank, generator=generator).to(dtype)
    with checked() as report:
        out = torch.empty(rows - first, columns, dtype=dtype)
        launch = prepare_dequantize_lora(parts_of(nf4), a, b, 0.37, first, out)
        tiles = {**launch.constants, "BM": bm, "BN": bn}
        type(launch)(launch.kernel, (-(columns // -bn), -((rows - first) // -bm)), launch.args, tiles, {}).run()
    assert report.launches == ["nf4_lora_kernel"]
    dense = dequantize_nf4(nf4, torch.float32)
    exact = dense[first:].double() + 0.37 * b[first:].double() @ a.double()
    naive = torch.addmm(dense[first:].to(dtype), b[first:], a, alpha=0.37)
    close_to_exact(out, exact, naive)


def test_update_needs_whole_blocks_in_a_row() -> None:
    nf4 = quantized(4, 96, True)
    with pytest.raises(ValueError, match="multiple of 64, got 96"):
        prepare_dequantize_lora(parts_of(nf4), torch.zeros(2, 96), torch.zeros(4, 2), 1.0, 0, torch.empty(4, 96))


def test_a_matrix_that_is_too_small_is_found() -> None:
    nf4 = quantized(8, 64, True)
    short: Tensor = nf4.packed[:4].clone()
    parts = Nf4Parts(short, nf4.absmax, nf4.nested_absmax, nf4.offset, nf4_code(CPU), nested_code(CPU))
    with pytest.raises(KernelFault, match="load out of bounds"), checked():
        dequantize(parts, 0, 8 * 64, torch.float32)
