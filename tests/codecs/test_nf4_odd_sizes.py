"""N09: 4-bit quantisation of matrices whose size is no multiple of the block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frugal.codecs.nf4 import NF4Linear, NF4Tensors, dequantize_nf4, quantize_nf4
from frugal.codecs.nf4_codes import nf4_code

GAP = float(nf4_code(torch.device("cpu")).diff().max())


def block_absmax(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.flatten().abs()
    blocks = -(flat.numel() // -64)
    return torch.nn.functional.pad(flat, (0, blocks * 64 - flat.numel())).view(blocks, 64).amax(dim=1)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("shape", "blocks"), [((1, 63), 1), ((1, 64), 1), ((1, 65), 2), ((1, 100), 2), ((4, 17), 2)])
def test_round_trip(shape: tuple[int, int], blocks: int, double: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    nf4 = quantize_nf4(weight, double)
    assert nf4.absmax.numel() == blocks
    back = dequantize_nf4(nf4, weight.dtype)
    assert back.shape == weight.shape
    assert back.dtype == weight.dtype
    assert torch.isfinite(back).all()
    largest = block_absmax(weight)
    if not double:  # with double quantisation the scales are rounded too
        assert torch.equal(nf4.scales, largest)
    slack = (nf4.scales - largest).abs() + 1e-6
    limit = (GAP / 2 * largest + slack).repeat_interleave(64)[: weight.numel()].view(shape)
    assert ((back - weight).abs() <= limit).all()


@pytest.mark.parametrize("double", [True, False])
def test_zeros_stay_zero(double: bool) -> None:
    assert torch.equal(dequantize_nf4(quantize_nf4(torch.zeros(4, 17), double)), torch.zeros(4, 17))


def test_one_outlier_spoils_only_its_block() -> None:
    weight = torch.full((2, 64), 0.01)
    weight[0, 5] = 1000.0
    back = dequantize_nf4(quantize_nf4(weight, double=False))
    assert back[0, 5] == 1000.0
    assert torch.equal(back[1], weight[1])


def test_the_last_block_depends_on_its_real_elements_alone() -> None:
    """The same five elements at the end give the same scale, whatever lay in memory before."""
    first, second = torch.randn(1, 69), torch.randn(1, 69) * 100
    second[0, 64:] = first[0, 64:]
    assert quantize_nf4(first, False).scales[1] == quantize_nf4(second, False).scales[1] == first[0, 64:].abs().max()


def test_transposed_input() -> None:
    weight = torch.randn(17, 4)
    a, b = quantize_nf4(weight.t()), quantize_nf4(weight.t().contiguous())
    assert torch.equal(a.packed, b.packed)
    assert torch.equal(dequantize_nf4(a), dequantize_nf4(b))


@pytest.mark.parametrize("double", [True, False])
def test_the_state_survives_a_file(tmp_path: Path, double: bool) -> None:
    nf4 = quantize_nf4(torch.randn(4, 17), double)
    named = {"packed": nf4.packed, "absmax": nf4.absmax, "nested_absmax": nf4.nested_absmax, "offset": nf4.offset}
    save_file({name: tensor for name, tensor in named.items() if tensor is not None}, tmp_path / "q.safetensors")
    read = load_file(tmp_path / "q.safetensors")
    again = NF4Tensors(read["packed"], read["absmax"], read.get("nested_absmax"), read.get("offset"), (4, 17))
    assert torch.equal(dequantize_nf4(again), dequantize_nf4(nf4))


def test_a_layer_of_odd_size_computes_right() -> None:
    linear = torch.nn.Linear(17, 5).requires_grad_(False)
    ours = NF4Linear.from_linear(linear)
    x = torch.randn(3, 17)
    torch.testing.assert_close(ours(x), torch.nn.functional.linear(x, ours.dequantize(), linear.bias))
