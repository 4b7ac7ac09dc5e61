"""Sampled programs at real sizes on sparse memory: addresses beyond 2^31 elements, Llama-3-8B and 70B, long contexts.

The last program of each launch is the one whose addresses are largest. Its result is checked by value, and the
sanitizer checks every address.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.codecs.nf4_codes import nested_code, nf4_code
from frugal.ops.adam8bit.triton import adam8bit_
from frugal.ops.gated_mlp.triton import gated, gated_backward_
from frugal.ops.linear_cross_entropy.triton import cross_entropy_, cross_entropy_once_
from frugal.ops.rms_norm.triton import prepare_rms_norm, prepare_rms_norm_backward
from frugal.ops.rope.triton import rope_
from frugal.ops.weights.triton import Nf4Parts, prepare_dequantize, prepare_dequantize_lora
from tests.kernels.support import checked, close_to_exact, sparse_empty

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def first_and_last(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    return [(0, 0, 0), (grid[0] - 1, grid[1] - 1, grid[2] - 1)]


REAL: dict[str, Any] = {"programs": first_and_last, "poison": False}


@pytest.mark.parametrize(("tokens", "vocab"), [(20_000, 128_256), (16_384, 262_144)])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_cross_entropy(tokens: int, vocab: int, cap: float | None) -> None:
    assert tokens * vocab > 2**31
    logits = sparse_empty((tokens, vocab), BF16)
    row = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(0)).to(BF16)
    logits[-1] = row
    labels = torch.zeros(tokens, dtype=torch.int64)
    labels[-1] = vocab - 1
    with checked(**REAL):
        loss = cross_entropy_(logits, labels, softcap=cap)
    leaf = row.double().requires_grad_()
    z = leaf if cap is None else cap * torch.tanh(leaf / cap)
    exact = F.cross_entropy(z[None], labels[-1:])
    (gradient,) = torch.autograd.grad(exact, leaf)
    assert loss[-1].item() == pytest.approx(exact.item(), rel=1e-5)
    close_to_exact(logits[-1], gradient, slack=1.5)


@pytest.mark.parametrize(("tokens", "vocab"), [(20_000, 128_256), (16_384, 262_144)])
def test_cross_entropy_once(tokens: int, vocab: int) -> None:
    assert tokens * vocab > 2**31
    logits = sparse_empty((tokens, vocab), BF16)
    row = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(0)).to(BF16)
    logits[-1] = row
    labels = torch.zeros(tokens, dtype=torch.int64)
    labels[-1] = vocab - 1
    with checked(**REAL):
        loss, factor = cross_entropy_once_(logits, labels)
    leaf = row.double().requires_grad_()
    exact = F.cross_entropy(leaf[None], labels[-1:])
    (gradient,) = torch.autograd.grad(exact, leaf)
    assert loss[-1].item() == pytest.approx(exact.item(), rel=1e-5)
    close_to_exact((factor[-1] * logits[-1].float()).to(BF16), gradient, slack=3.0)


@pytest.mark.parametrize(("tokens", "columns"), [(100_000, 28_672), (160_000, 14_336)])
def test_gated(tokens: int, columns: int) -> None:
    """70B's and 8B's intermediate size; the flat count passes 2^31."""
    assert tokens * columns > 2**31
    gate, up, out = (sparse_empty((tokens, columns), BF16) for _ in range(3))
    g, u = torch.randn(2, columns, generator=torch.Generator().manual_seed(1)).to(BF16)
    gate[-1], up[-1] = g, u
    with checked(**REAL):
        gated(gate, up, out)
    n = 64
    close_to_exact(out[-1, -n:], F.silu(g.double()[-n:]) * u.double()[-n:])
    out[-1] = 1.0
    with checked(**REAL):
        gated_backward_(out, gate, up)
    close_to_exact(up[-1, -n:], F.silu(g.double()[-n:]))


def test_gated_halves_of_one_buffer() -> None:
    both = sparse_empty((100_000, 2 * 28_672), BF16)
    gate, up = both[:, :28_672], both[:, 28_672:]
    out = sparse_empty((100_000, 28_672), BF16)
    gate[-1, -8:], up[-1, -8:] = 2.0, 3.0
    with checked(**REAL):
        gated(gate, up, out)
    close_to_exact(out[-1, -8:], F.silu(torch.full((8,), 2.0, dtype=torch.float64)) * 3)


@pytest.mark.parametrize(("rows", "columns"), [(600_000, 4096), (300_000, 8192), (8_000_000, 128 * 4)])
def test_rms_norm(rows: int, columns: int) -> None:
    assert rows * columns > 2**31
    x, dy, out = (sparse_empty((rows, columns), BF16) for _ in range(3))
    generator = torch.Generator().manual_seed(2)
    x[-1], dy[-1] = torch.randn(2, columns, generator=generator).to(BF16)
    x[-600:-1] = 1.0
    weight = torch.rand(columns, generator=generator).to(BF16)
    with checked(**REAL):
        prepare_rms_norm(x, weight, 1e-6, 0.0, out).run()
    leaf = x[-1].double().requires_grad_()
    exact = leaf * torch.rsqrt(leaf.square().mean() + 1e-6) * weight.double()
    close_to_exact(out[-1], exact.detach())
    launch, partial = prepare_rms_norm_backward(dy, x, weight, 1e-6, 0.0, out, True)
    assert partial is not None
    with checked(**REAL):
        launch.run()
    (gradient,) = torch.autograd.grad(exact, leaf, dy[-1].double())
    close_to_exact(out[-1], gradient)


@pytest.mark.parametrize(("q_heads", "k_heads", "tokens"), [(32, 8, 600_000), (64, 8, 300_000)])
def test_rope(q_heads: int, k_heads: int, tokens: int) -> None:
    assert tokens * q_heads * 128 > 2**31
    q = sparse_empty((1, tokens, q_heads, 128), BF16).transpose(1, 2)
    k = sparse_empty((1, tokens, k_heads, 128), BF16).transpose(1, 2)
    cos, sin = (sparse_empty((1, tokens, 128), torch.float32)[..., :64] for _ in range(2))
    cos[0, -1], sin[0, -1] = 0.6, 0.8
    q[0, :, -1] = torch.arange(128.0).to(BF16)
    k[0, :, -1] = 2.0
    with checked(**REAL):
        rope_(q, k, cos, sin)
    a, b = torch.arange(64.0, dtype=torch.float64), torch.arange(64.0, 128.0, dtype=torch.float64)
    c, s = cos[0, -1].double(), sin[0, -1].double()
    close_to_exact(q[0, -1, -1], torch.cat([a * c - b * s, b * c + a * s]))
    close_to_exact(k[0, -1, -1], torch.cat([2 * c - 2 * s, 2 * c + 2 * s]))


def nf4_parts(rows: int, columns: int) -> tuple[Nf4Parts, Tensor]:
    """Storage of a [rows, columns] matrix, zero but for its last row; and that row's values."""
    blocks = rows * columns // 64
    packed, absmax = sparse_empty((rows, columns // 2), torch.uint8), sparse_empty((blocks,), torch.uint8)
    nested, offset = sparse_empty((-(blocks // -256),), torch.float32), torch.full((1,), 0.5)
    generator = torch.Generator().manual_seed(3)
    last = columns // 64
    packed[-1] = torch.randint(256, (columns // 2,), generator=generator, dtype=torch.uint8)
    absmax[-last:] = torch.randint(256, (last,), generator=generator, dtype=torch.uint8)
    nested[-2:] = torch.tensor([0.25, 0.75])
    code, map256 = nf4_code(CPU), nested_code(CPU)
    group = torch.arange(blocks - last, blocks) // 256
    scale = map256[absmax[-last:].long()] * nested[group] + 0.5
    values = torch.stack([code[(packed[-1] >> 4).long()], code[(packed[-1] & 15).long()]], 1).flatten()
    parts = Nf4Parts(packed, absmax, nested.view(torch.int32), offset.view(torch.int32), code, map256)
    return parts, values * scale.repeat_interleave(64)


@pytest.mark.parametrize(("rows", "columns"), [(128_256, 8192), (262_144, 16_384)])
def test_nf4(rows: int, columns: int) -> None:
    """A 70B head's size, and one whose element count passes 2^32."""
    parts, expected = nf4_parts(rows, columns)
    out = sparse_empty((rows, columns), BF16)
    with checked(**REAL):
        prepare_dequantize(parts, 0, rows * columns, out.view(-1)).run()
    assert torch.equal(out[-1, -64:], expected[-64:].to(BF16))
    tail = torch.empty(columns, dtype=torch.float32)
    with checked(poison=False):
        prepare_dequantize(parts, (rows - 1) * columns, rows * columns, tail).run()
    assert torch.equal(tail, expected)


def test_nf4_with_an_update() -> None:
    rows, columns = 262_144, 16_384
    parts, expected = nf4_parts(rows, columns)
    a, b = sparse_empty((16, columns), torch.float32), sparse_empty((rows, 16), torch.float32)
    a[:, -1] = 1.0
    b[-1] = 0.5
    out = sparse_empty((rows, columns), torch.float32)
    with checked(**REAL):
        prepare_dequantize_lora(parts, a, b, 2.0, 0, out).run()
    expected[-1] += 16.0
    assert torch.allclose(out[-1, -64:], expected[-64:], rtol=1e-6, atol=0)
    half = sparse_empty((rows // 2, columns), torch.float32)
    with checked(**REAL):
        prepare_dequantize_lora(parts, a, b, 2.0, rows // 2, half).run()
    assert torch.equal(half[-1, -64:], out[-1, -64:])


def test_adam8bit() -> None:
    count = 2**31 + 1000  # a trained 70B head with its own embedding is near
    blocks = -(count // -256)
    param, grad = sparse_empty((count,), BF16), sparse_empty((count,), BF16)
    states = [sparse_empty((count,), torch.uint8) for _ in range(2)]
    scales = [sparse_empty((blocks,), torch.float32) for _ in range(2)]
    maps = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
    param[-1], grad[-1] = 1.0, 3.0
    with checked(**REAL):
        adam8bit_(param, grad, *states, *scales, *maps, lr=0.25, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0, step=1)
    assert param[-1].item() == pytest.approx(0.75, abs=0.01)  # the first step of Adam is lr times the sign
    assert scales[0][-1].item() == pytest.approx(0.3, rel=1e-5)
