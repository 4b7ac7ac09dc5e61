"""Loss and gradient of a chunk of logits in place, against float64 autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from frugal.ops.launch import Launch, tile
from frugal.ops.linear_cross_entropy.triton import (
    cross_entropy_,
    cross_entropy_once_,
    levels_shape,
    pays,
    prepare_cross_entropy,
    prepare_cross_entropy_once,
)
from tests.kernels.support import checked, close_to_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 5.0, "scale": 2.0},
    "smoothed": {"label_smoothing": 0.1},
    "all": {"scale": 0.5, "softcap": 3.0, "label_smoothing": 0.2},
}


def losses(logits: Tensor, labels: Tensor, *, scale: float = 1.0, softcap: float | None = None,
           label_smoothing: float = 0.0) -> Tensor:  # fmt: skip
    """The definition, all logits at once."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    keep = labels != -100
    lse = torch.logsumexp(z, 1)
    hit = z.gather(1, labels.where(keep, 0)[:, None])[:, 0]
    loss = (1 - label_smoothing) * (lse - hit)
    if label_smoothing:
        loss = loss + label_smoothing * (lse - z.mean(1))
    return loss.where(keep, 0.0)


def with_block(launch: Launch, block: int) -> Launch:
    vocab = launch.args[4]
    constants = {**launch.constants, "BLOCK": block, "ONE_READ": vocab <= block}
    return Launch(launch.kernel, launch.grid, launch.args, constants, launch.options)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "block"), [(300, 512), (300, 64), (513, 128), (256, 64)])
def test_loss_and_gradient(vocab: int, block: int, dtype: torch.dtype, case: str) -> None:
    options = dict(CASES[case])
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(5, vocab, generator=generator)).to(dtype)
    labels = torch.tensor([0, vocab - 1, -100, 65, 130])
    leaf = logits.double().requires_grad_()
    exact = losses(leaf, labels, **options)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), leaf)
    leaf = logits.clone().requires_grad_()
    naive = losses(leaf, labels, **options)
    (naive_gradient,) = torch.autograd.grad(naive.sum(), leaf)
    with checked():
        loss = torch.empty(5)
        with_block(prepare_cross_entropy(logits, labels, loss, **options), block).run()
    close_to_exact(loss, exact.detach(), naive.detach())
    close_to_exact(logits, exact_gradient, naive_gradient)
    assert (logits[2] == 0).all()
    assert loss[2] == 0


def test_loss_alone_leaves_the_logits() -> None:
    logits, labels = torch.randn(3, 70), torch.tensor([1, 2, -100])
    before = logits.clone()
    with checked() as report:
        loss = cross_entropy_(logits, labels, gradient=False)
    assert torch.equal(logits, before)
    close_to_exact(loss, losses(before.double(), labels))
    assert report.stored == 3 * 4


def test_rows_with_gaps() -> None:
    wide = torch.full((4, 128), 9.0)
    wide[:, :100] = torch.randn(4, 100)
    expected = wide[:, :100].double()
    labels = torch.tensor([99, 0, 50, 7])
    with checked():
        loss = cross_entropy_(wide[:, :100], labels)
    close_to_exact(loss, losses(expected, labels))
    assert (wide[:, 100:] == 9.0).all()


def test_large_logits_and_pieces_of_minus_infinity() -> None:
    logits = torch.full((2, 256), -torch.inf)
    logits[0, 200:] = torch.linspace(-3e4, 3e4, 56)
    logits[1, 3] = 5.0
    labels = torch.tensor([255, 3])
    exact = losses(logits.double(), labels)
    with checked():
        loss = torch.empty(2)
        with_block(prepare_cross_entropy(logits, labels, loss), 64).run()
    close_to_exact(loss, exact)
    assert torch.isfinite(logits).all()


def test_rows_of_the_first_and_second_kind() -> None:
    """Which rows are read once: from the table, by vocabulary."""
    labels, loss = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    for vocab, one_read in ((1000, True), (32000, True), (128256, False)):
        launch = prepare_cross_entropy(torch.zeros(2, vocab, dtype=torch.bfloat16), labels, loss)
        assert launch.constants["ONE_READ"] is one_read


def once(logits: Tensor, labels: Tensor, block: int, **options: Any) -> tuple[Tensor, Tensor]:
    """(loss, factor) of the kernel that reads once, with pieces of ``block`` columns."""
    loss, factor = torch.empty(2, logits.shape[0])
    levels = torch.empty(logits.shape[0] * -(logits.shape[1] // -block))
    launch = prepare_cross_entropy_once(logits, labels, loss, factor, levels, **options)
    launch = Launch(launch.kernel, launch.grid, launch.args, {**launch.constants, "BLOCK": block}, launch.options)
    with checked():
        launch.run()
    return loss, factor


def rows_of(kind: str, vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows that take each way through the kernel: with 64 columns a piece, labels as in the test below."""
    logits = 2 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "rising":  # the level is raised by every piece
        logits += torch.arange(vocab) // 64 * 60.0
    elif kind == "flat":  # a total past float16's room
        logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)) * 1e-2
    elif kind == "falling":
        logits -= torch.arange(vocab) // 64 * 60.0
    elif kind == "masked":  # pieces of -inf before and after
        logits[:, :70] = -torch.inf
        logits[:, 140:200] = -torch.inf
        logits[1] = -torch.inf
        logits[1, vocab - 1] = -700.0
    return logits.to(dtype)


@pytest.mark.parametrize("kind", ["plain", "rising", "falling", "flat", "masked"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["plain", "capped"])
def test_rows_read_once(case: str, dtype: torch.dtype, kind: str) -> None:
    """Gradients of a row divided by its factor, whatever the order in which large values come."""
    vocab = 9000 if kind == "flat" else 300
    options: dict[str, Any] = {"capped": {"softcap": 30.0, "scale": 0.5}}.get(case, {})
    if case == "capped" and kind == "masked":
        return  # a cap leaves no -inf
    logits = rows_of(kind, vocab, dtype)
    labels = torch.tensor([100, vocab - 1, -100, 130, 210, 250])
    leaf = logits.double().requires_grad_()
    exact = losses(leaf, labels, **options)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), leaf)
    leaf = logits.clone().requires_grad_()
    naive = losses(leaf, labels, **options)
    (naive_gradient,) = torch.autograd.grad(naive.sum(), leaf)
    loss, factor = once(logits, labels, 4096 if kind == "flat" else 64, **options)
    close_to_exact(loss, exact.detach(), naive.detach(), slack=8.0)  # the difference of two numbers near 30
    assert torch.isfinite(logits).all()
    gradient = factor[:, None].double() * logits.double()
    # Divided and multiplied in another order: a rounding more than the kernel that writes the gradient itself.
    close_to_exact(gradient.to(dtype), exact_gradient, naive_gradient, slack=3.0 if dtype != torch.float32 else 16.0)
    assert (logits[2] == 0).all()
    assert (loss[2], factor[2]) == (0, 0)


def test_a_label_that_the_caller_masked() -> None:
    """An infinite loss, but a gradient as of any other row, though the first pieces hold nothing finite."""
    logits = torch.randn(1, 300)
    logits[:, :130] = -torch.inf
    leaf = logits.double().requires_grad_()
    labels = torch.tensor([3])
    (exact,) = torch.autograd.grad(torch.logsumexp(leaf, 1).sum(), leaf)
    exact[0, 3] -= 1
    loss, factor = once(logits, labels, 64)
    assert loss.item() == torch.inf
    close_to_exact(factor[:, None] * logits, exact, slack=16.0)


def test_raised_levels_are_seen() -> None:
    """The rows of the test above do take the ways they are made for."""
    labels = torch.tensor([100, 299, -100, 130, 210, 250])
    logits = rows_of("rising", 300, torch.float32)
    loss, factor = torch.empty(2, 6)
    levels = torch.empty(6, 5)
    launch = prepare_cross_entropy_once(logits, labels, loss, factor, levels)
    Launch(launch.kernel, launch.grid, launch.args, {**launch.constants, "BLOCK": 64}, launch.options).run()
    assert len(levels[0].unique()) > 2
    logits = rows_of("flat", 9000, torch.float16)
    _, factor = cross_entropy_once_(logits, labels)
    assert factor[0] == pytest.approx(1.0, abs=1e-6)


def test_rows_with_gaps_read_once() -> None:
    wide = torch.full((4, 128), 9.0)
    wide[:, :100] = torch.randn(4, 100)
    expected = wide[:, :100].double()
    labels = torch.tensor([99, 0, 50, 7])
    loss, _ = once(wide[:, :100], labels, 64)
    close_to_exact(loss, losses(expected, labels))
    assert (wide[:, 100:] == 9.0).all()


def test_who_is_read_once() -> None:
    cpu = torch.device("cpu")
    assert not pays(32000, torch.bfloat16, cpu)
    assert pays(49152, torch.bfloat16, cpu)
    assert pays(32000, torch.float32, cpu)
    pieces = -(9000 // -tile("cross_entropy_once", torch.float32, cpu)["BLOCK"])
    assert levels_shape(torch.zeros(2, 9000)) == (2, pieces)
    with pytest.raises(ValueError, match=f"{2 * pieces} levels expected, got 1"):
        prepare_cross_entropy_once(torch.zeros(2, 9000), torch.zeros(2, dtype=torch.int64), *torch.zeros(2, 2),
                                torch.zeros(1))  # fmt: skip


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="labels and float32 loss"):
        prepare_cross_entropy(torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(2))
    with pytest.raises(ValueError, match="side by side"):
        cross_entropy_(torch.zeros(8, 2).t(), torch.zeros(2, dtype=torch.int64))
