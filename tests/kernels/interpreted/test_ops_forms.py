"""The operations with their Triton form, gradients included, against their references."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from frugal.codecs.nf4 import quantize_nf4
from frugal.ops import adam8bit, projection, registry, weights
from frugal.ops.adam8bit import adam8bit_
from frugal.ops.gated_mlp import gated_mlp, gated_mlp_reference
from frugal.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from frugal.ops.linear_cross_entropy import triton as loss_kernels
from frugal.ops.projection import LoraMatmul, Projection
from frugal.ops.rms_norm import rms_norm, rms_norm_reference
from frugal.ops.rope import rope_joint, rope_pair, rope_reference
from frugal.ops.weights.triton import nf4_rows, nf4_rows_with_update
from frugal.training.optim8bit import AdamW8bit
from tests.kernels.support import bits_equal, checked


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def same(got: Any, expected: Any, inputs: list[Tensor], **tolerance: float) -> None:
    """Values and gradients alike."""
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(expected.dtype)
    torch.testing.assert_close(got, expected, **tolerance)
    with checked():
        ours = torch.autograd.grad(got, inputs, upstream)
    for mine, reference in zip(ours, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, reference, **tolerance)


def test_rms_norm() -> None:
    x, weight = leaves((2, 5, 48), (48,))
    for w, offset in ((weight, 0.0), (weight, 1.0), (None, 0.0)):
        with checked() as report:
            got = rms_norm(x, w, 1e-6, offset=offset, implementation="triton")
        assert report.launches == ["rms_norm_kernel"]
        same(got, rms_norm_reference(x, w, 1e-6, offset=offset), [x] if w is None else [x, w], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("trained", ["all", "gate", "input"])
def test_gated_mlp(activation: Any, trained: str) -> None:
    x, gate, up, down, *adapters = leaves(
        (7, 24), (40, 24), (40, 24), (24, 40), (4, 24), (40, 4), (4, 24), (40, 4), (4, 40), (24, 4)
    )
    weights = [w.detach() for w in (gate, up, down)]
    pairs = [(adapters[i], adapters[i + 1], 0.5) for i in (0, 2, 4)]
    wanted = {"all": [x, *adapters], "gate": [x, *adapters[:2]], "input": [x]}[trained]
    count = {"all": 3, "gate": 1, "input": 0}[trained]
    parts = [Projection(w, None, pairs[i] if i < count else None) for i, w in enumerate(weights)]
    with checked() as report:
        got = gated_mlp(x, tuple(parts[:2]), parts[2], activation=activation, tile_tokens=3, implementation="triton")
    assert report.launches == ["gated_kernel"] * 3
    expected = gated_mlp_reference(x, tuple(parts[:2]), parts[2], activation=activation)
    same(got, expected, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["dense", "nf4"])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "logit_scale": 0.7, "label_smoothing": 0.1}])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_linear_cross_entropy(options: dict[str, Any], storage: str, dtype: torch.dtype, reduction: Any) -> None:
    hidden, weight = leaves((9, 64), (130, 64), dtype=dtype)
    weight = weight.detach()
    labels = torch.tensor([1, 129, -100, 5, 0, 7, -100, 64, 3])
    upstream = torch.linspace(0.5, 2.0, 9)
    head: Any = weight
    if storage == "nf4":
        head = quantize_nf4(weight)
        weight = head.dequantize_rows(0, 130, dtype)
    for name, form in (("triton", True), ("torch", False)):
        with checked() as report:
            loss = linear_cross_entropy(
                hidden, head, labels, chunk_tokens=4, implementation=name, reduction=reduction, **options
            )
        assert ("cross_entropy_kernel" in report.launches) is form
        wide = hidden.detach().double().requires_grad_()
        exact = linear_cross_entropy_reference(wide, weight.double(), labels, reduction=reduction, **options)
        rtol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(loss.double(), exact, rtol=rtol, atol=0)
        above = upstream if reduction == "none" else None
        (ours,) = torch.autograd.grad(loss, hidden, above)
        (reference,) = torch.autograd.grad(exact, wide, above if above is None else above.double())
        bound = (1e-5 if dtype == torch.float32 else 2e-2) * reference.abs().max()
        assert (ours.double() - reference).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "logit_scale": 0.7}])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_linear_cross_entropy_reads_long_rows_once(
    options: dict[str, Any], dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_kernels, "pays", lambda vocab, dtype, device: True)
    hidden, weight = leaves((9, 64), (130, 64), dtype=dtype)
    weight = weight.detach() / 4
    labels = torch.tensor([1, 129, -100, 5, 0, 7, -100, 64, 3])
    settings: dict[str, Any] = {"reduction": reduction, **options}
    above = torch.linspace(0.5, 2.0, 9) if reduction == "none" else None
    with checked() as report:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4, implementation="triton", **settings)
    wide = hidden.detach().double().requires_grad_()
    exact = linear_cross_entropy_reference(wide, weight.double(), labels, **settings)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss.double(), exact, rtol=rtol, atol=0)
    (reference,) = torch.autograd.grad(exact, wide, above if above is None else above.double())
    with checked() as backward:
        (ours,) = torch.autograd.grad(loss, hidden, above)
    # one number a token came from above: the chunks are made again, once the factors of their rows are known
    made = backward if reduction == "none" else report
    assert made.launches == ["cross_entropy_once_kernel"] * 2
    assert (ours.double() - reference).abs().max() <= rtol * reference.abs().max()
    with checked() as report, torch.no_grad():  # no gradient, no second form
        linear_cross_entropy(hidden.detach(), weight, labels, implementation="triton", **settings)
        linear_cross_entropy(hidden.detach(), weight, labels, implementation="triton", label_smoothing=0.1)
    assert set(report.launches) == {"cross_entropy_kernel"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam8bit_by_name(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(1000, generator=generator).to(dtype) for _ in range(2))
    maps = AdamW8bit([start])._dynamic_maps(start.device)
    found = []
    for name in ("triton", "bitsandbytes"):
        param, states, scales = start.clone(), torch.zeros(2, 1000, dtype=torch.uint8), torch.zeros(2, 4)
        with checked() as report:
            adam8bit_(param, grad, *states, *scales, *maps, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1,
                      step=1, implementation=name)  # fmt: skip
        assert report.launches == (["adam8bit_kernel"] if name == "triton" else [])
        found.append((param, *scales))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_the_optimizer_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 steps down a bowl with the kernel and with bitsandbytes' operation: parameters stay near each other."""
    ends = []
    for kernel in (True, False):
        form = registry._FORMS["adam8bit", "triton" if kernel else "bitsandbytes"]
        monkeypatch.setattr(adam8bit, "resolve", lambda op, x, implementation, form=form: (form, None))
        generator = torch.Generator().manual_seed(0)
        matrix, vector = torch.randn(64, 65, generator=generator), torch.randn(70, generator=generator)
        parameters = [matrix.t().requires_grad_(), vector.requires_grad_()]  # not contiguous; too small for 8 bits
        optimizer = AdamW8bit(parameters, lr=0.05, weight_decay=0.01)
        for step in range(30):
            for p in parameters:
                p.grad = p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
            with checked() as report:
                optimizer.step()
            assert report.launches == (["adam8bit_kernel"] if kernel else []), step
        ends.append([p.detach().clone() for p in parameters])
    assert torch.equal(ends[0][1], ends[1][1])
    apart = (ends[0][0] - ends[1][0]).abs()
    assert apart.mean() < 0.002  # a hundredth of what 30 steps of 0.05 moved
    assert apart.max() < 0.05


def test_linear_cross_entropy_with_a_trained_head_keeps_fp32_logits() -> None:
    hidden, weight = leaves((5, 16), (40, 16))
    labels = torch.tensor([1, 2, 3, 4, 5])
    with checked() as report:
        got = linear_cross_entropy(hidden, weight, labels, implementation="triton")
    assert report.launches == []
    same(got, linear_cross_entropy_reference(hidden, weight, labels), [hidden, weight], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [16, 24])
def test_rope_pair(size: int) -> None:
    """In place on views of one tensor, as a joint projection of q, k and v gives them; also with partial rotation."""
    angle = torch.rand(1, 6, 8) * 6
    cos, sin = angle.cos(), angle.sin()
    wide = [torch.cat([t, t], -1)[:, None] for t in (cos, sin)]
    for name, way in itertools.product(("triton", "torch"), ("pair", "joint")):
        (joint,) = leaves((2, 6, 8 * size))
        q, k, v = (t.view(2, 6, -1, size).transpose(1, 2) for t in joint.split([4 * size, 2 * size, 2 * size], -1))
        expected = (rope_reference(q, *wide), rope_reference(k, *wide), v)
        with checked() as report:
            if way == "pair":
                turned = [*rope_pair(q * 1.0, k * 1.0, cos, sin, implementation=name), v]
            else:
                rows = (joint * 1.0).view(2, 6, 8, size).transpose(1, 2)
                turned = [rope_joint(rows, 6, cos, sin, implementation=name)]
                assert turned[0].data_ptr() == rows.data_ptr()
        assert report.launches == (["rope_kernel"] if name == "triton" else [])
        same(torch.cat(turned, 1), torch.cat(expected, 1), [joint], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("columns", [64, 40])
def test_nf4_rows(columns: int, double: bool) -> None:
    nf4 = quantize_nf4(torch.randn(90, columns), double)
    for start, stop in ((0, 90), (3, 17), (64, 1000)):
        with checked():
            got = nf4_rows(nf4, start, stop, torch.bfloat16)
        bits_equal(got, nf4.dequantize_rows(start, stop, torch.bfloat16))


@pytest.mark.parametrize("double", [True, False])
def test_nf4_columns(double: bool) -> None:
    """Columns of rows, written without the others: what dX is made of in 16 bits (S1)."""
    nf4 = quantize_nf4(torch.randn(90, 320), double)
    for (start, stop), (first, last) in (((0, 90), (64, 256)), ((7, 30), (0, 64)), ((64, 1000), (192, 320))):
        with checked():
            got = nf4_rows(nf4, start, stop, torch.bfloat16, columns=(first, last))
        bits_equal(got, nf4.dequantize_rows(start, stop, torch.bfloat16)[:, first:last].contiguous())


def test_nf4_rows_with_update() -> None:
    nf4 = quantize_nf4(torch.randn(90, 64))
    a, b = torch.randn(8, 64), torch.randn(90, 8)
    with checked():
        got = nf4_rows_with_update(nf4, 5, 40, a, b, 0.25, torch.float32)
    expected = nf4.dequantize_rows(5, 40, torch.float32) + 0.25 * b[5:40] @ a
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_projection_that_adds_its_update_takes_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    nf4 = quantize_nf4(torch.randn(90, 64))
    a, b, x = torch.randn(8, 64), torch.randn(90, 8), torch.randn(200, 64)
    for module in (projection, weights):
        monkeypatch.setattr(module, "resolve", lambda op, x, **facts: (registry._form(op, "triton", fake=False), None))
    with checked() as report:
        run = LoraMatmul(Projection(nf4, None, (a, b, 0.25)), torch.float32, torch.device("cpu"), 200)
        got = run.forward(x, torch.empty(200, 90))
    assert set(report.launches) == {"nf4_lora_kernel"}
    dense = nf4.dequantize_rows(0, 90, torch.float32)
    torch.testing.assert_close(got, x @ dense.t() + 0.25 * (x @ a.t()) @ b.t(), rtol=1e-4, atol=1e-4)
    with checked() as report:
        narrow = torch.bfloat16
        run = LoraMatmul(Projection(nf4, None, (a, b, 0.25)), narrow, torch.device("cpu"), 200)
        run.forward(x.to(narrow), torch.empty(200, 90, dtype=narrow))
    assert set(report.launches) == {"nf4_dequantize_kernel"}
