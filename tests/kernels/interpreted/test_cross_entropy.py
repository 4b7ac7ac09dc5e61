"""Loss and gradient of a chunk of logits in place, against float64 autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from frugal.kernels.cross_entropy import cross_entropy_, plan_cross_entropy
from frugal.kernels.launch import Launch
from tests.kernels.support import checked, close_to_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 5.0, "scale": 2.0},
    "smoothed": {"label_smoothing": 0.1},
    "z": {"z_loss": 0.01},
    "all": {"scale": 0.5, "softcap": 3.0, "label_smoothing": 0.2, "z_loss": 0.02, "weighted": True},
}


def losses(logits: Tensor, labels: Tensor, *, scale: float = 1.0, softcap: float | None = None,
           label_smoothing: float = 0.0, z_loss: float = 0.0, token_weights: Tensor | None = None,
           ignore_index: int = -100) -> Tensor:  # fmt: skip
    """The definition, all logits at once."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    keep = labels != ignore_index
    lse = torch.logsumexp(z, 1)
    hit = z.gather(1, labels.where(keep, 0)[:, None])[:, 0]
    loss = (1 - label_smoothing) * (lse - hit) + z_loss * lse**2
    if label_smoothing:
        loss = loss + label_smoothing * (lse - z.mean(1))
    if token_weights is not None:
        loss = loss * token_weights
    return loss.where(keep, 0.0)


def with_block(launch: Launch, block: int) -> Launch:
    vocab = launch.args[5]
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
    if options.pop("weighted", False):
        options["token_weights"] = torch.tensor([0.5, 2.0, 3.0, 0.0, 1.0])
    leaf = logits.double().requires_grad_()
    exact = losses(leaf, labels, **options)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), leaf)
    leaf = logits.clone().requires_grad_()
    naive = losses(leaf, labels, **options)
    (naive_gradient,) = torch.autograd.grad(naive.sum(), leaf)
    with checked():
        loss = torch.empty(5)
        with_block(plan_cross_entropy(logits, labels, loss, **options), block).run()
    close_to_exact(loss, exact.detach(), naive.detach())
    close_to_exact(logits, exact_gradient, naive_gradient)
    assert (logits[2] == 0).all()
    assert loss[2] == 0


def test_loss_alone_leaves_the_logits() -> None:
    logits, labels = torch.randn(3, 70), torch.tensor([1, 2, -1])
    before = logits.clone()
    with checked() as report:
        loss = cross_entropy_(logits, labels, ignore_index=-1, gradient=False)
    assert torch.equal(logits, before)
    close_to_exact(loss, losses(before.double(), labels, ignore_index=-1))
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
        with_block(plan_cross_entropy(logits, labels, loss), 64).run()
    close_to_exact(loss, exact)
    assert torch.isfinite(logits).all()


def test_rows_of_the_first_and_second_kind() -> None:
    """Which rows are read once: from the table, by vocabulary."""
    labels, loss = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    for vocab, one_read in ((1000, True), (32000, True), (128256, False)):
        launch = plan_cross_entropy(torch.zeros(2, vocab, dtype=torch.bfloat16), labels, loss)
        assert launch.constants["ONE_READ"] is one_read


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="labels and float32 loss"):
        plan_cross_entropy(torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(2))
    with pytest.raises(ValueError, match="token_weights"):
        cross_entropy_(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), token_weights=torch.zeros(3))
