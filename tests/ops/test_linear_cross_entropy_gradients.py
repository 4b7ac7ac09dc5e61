"""N08: the fused linear cross-entropy has the right loss and the right gradients, in every form and chunk size."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from frugal.ops import linear_cross_entropy

HIDDEN = 10
Form = Literal["mean", "sum", "none", "mean of 7"]


def inputs(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head and labels of 4 tokens of which the first is masked."""
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(4, HIDDEN, dtype=torch.float64, generator=generator)
    head = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab, (4,), generator=generator)
    labels[0], labels[3] = -100, vocab - 1
    return hidden, head, labels


def plain(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, form: Form) -> torch.Tensor:
    """Token by token, as it would be written on paper."""
    losses = []
    for token in range(len(labels)):
        scores = (head * hidden[token]).sum(-1)
        own = scores.new_zeros(())
        if labels[token] != -100:
            own = torch.log(torch.exp(scores - scores.max()).sum()) + scores.max() - scores[labels[token]]
        losses.append(own)
    every = torch.stack(losses)
    trained = int((labels != -100).sum())
    return {"none": every, "sum": every.sum(), "mean": every.sum() / max(trained, 1), "mean of 7": every.sum() / 7}[
        form
    ]


def fused(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    form: Form,
    chunk: int | None,
) -> torch.Tensor:
    count = 7.0 if form == "mean of 7" else None
    reduction: Literal["mean", "sum", "none"] = "mean" if form == "mean of 7" else form
    return linear_cross_entropy(hidden, head, labels, reduction=reduction, count=count, chunk_tokens=chunk)


@pytest.mark.parametrize("vocab", [15, 17, 32003])
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("form", ["mean", "sum", "none", "mean of 7"])
def test_loss_and_both_gradients(vocab: int, chunk: int | None, form: Form) -> None:
    hidden, head, labels = inputs(vocab)
    upstream = torch.tensor([3.0, 0.5, -2.0, 1.5], dtype=torch.float64) if form == "none" else torch.tensor(-1.7)
    found = []
    for compute in (lambda h, w: fused(h, w, labels, form, chunk), lambda h, w: plain(h, w, labels, form)):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss = compute(h, w)
        loss.backward(upstream.to(loss.dtype))
        found.append((loss.detach(), h.grad, w.grad))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-9)
    assert found[0][1] is not None
    assert not found[0][1][0].any()  # the masked token takes no part
    assert found[0][1][2].any()
    if form == "none":  # one upstream gradient a token, not the first one's for all
        single = torch.autograd.grad(fused(h, w, labels, form, chunk)[2], h)[0]
        assert torch.nonzero(single.abs().sum(-1)).flatten().tolist() == [2]


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("form", ["mean", "sum", "mean of 7"])
def test_without_gradients_the_loss_is_the_same(chunk: int | None, form: Form) -> None:
    """Evaluation: nothing needs a gradient, and the loss is not 0."""
    hidden, head, labels = inputs(17)
    right = plain(hidden, head, labels, form)
    torch.testing.assert_close(fused(hidden, head, labels, form, chunk), right, rtol=1e-6, atol=0)
    with torch.no_grad():
        again = fused(hidden.requires_grad_(), head.requires_grad_(), labels, form, chunk)
    torch.testing.assert_close(again, right, rtol=1e-6, atol=0)
    assert not again.requires_grad
    assert again > 0.1


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_a_part_that_is_frozen_changes_nothing_for_the_other(frozen: str) -> None:
    hidden, head, labels = inputs(15)
    leaves = {"hidden": hidden.requires_grad_(frozen != "hidden"), "head": head.requires_grad_(frozen != "head")}
    trained = leaves["head" if frozen == "hidden" else "hidden"]
    (mine,) = torch.autograd.grad(fused(hidden, head, labels, "sum", 3), trained)
    (right,) = torch.autograd.grad(plain(hidden, head, labels, "sum"), trained)
    torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", ["mean", "sum", "mean of 7"])
def test_everything_masked_is_zero_and_not_nan(form: Form) -> None:
    hidden, head, labels = inputs(17)
    labels.fill_(-100)
    loss = fused(hidden.requires_grad_(), head.requires_grad_(), labels, form, 3)
    loss.backward()
    assert loss.item() == 0.0
    for gradient in (hidden.grad, head.grad):
        assert gradient is not None
        assert not gradient.any()
