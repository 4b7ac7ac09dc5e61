"""N01: gradient accumulation divides by all supervised tokens of the window, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frugal.training.loop import train_loop
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from tests.support import training as toy


class Gradients:
    """Stands where the optimizer steps: keeps what it was given."""

    def __init__(self, job: Any) -> None:
        self.found: dict[str, torch.Tensor] = {}
        original = job.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            for group in job.optimizer.param_groups:
                for name, parameter in zip(group["names"], group["params"], strict=True):
                    self.found[name] = parameter.grad.clone()
            return original(*args, **kwargs)

        job.optimizer.step = step


def one_step(targets: list[int], micro: int, accumulate: int, **more: Any) -> tuple[dict[str, torch.Tensor], float]:
    job = toy.make_job(
        toy.tiny_model(),
        toy.rows(targets),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        max_steps=1,
        max_grad_norm=0.0,
        **more,
    )
    gradients = Gradients(job)
    records: list[dict[str, Any]] = []
    train_loop(job, Hooks(records.append, lambda state: None, StopRequest()), LoopState())
    return gradients.found, records[-1]["loss"]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    flat = [torch.cat([found[name].flatten() for name in sorted(found)]) for found in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.mark.parametrize("flat", [False, True])
def test_gradient_and_loss_do_not_depend_on_the_cut(flat: bool) -> None:
    targets = [1, 9, 2, 4]
    whole, loss = one_step(targets, 4, 1, flat=flat)
    for micro, accumulate in ((2, 2), (1, 4), (3, 2)):
        parts, part_loss = one_step(targets, micro, accumulate, flat=flat)
        assert difference(whole, parts) < 1e-5
        assert part_loss == pytest.approx(loss, rel=1e-6)


def test_the_oracle() -> None:
    """Two rows with 1 and 3 targets, a micro-batch each: the mean over 4 tokens, neither of the two wrong ones."""
    _, loss = one_step([1, 3], 1, 2)
    model, data = toy.tiny_model(), toy.rows([1, 3])
    first, second = (reference(model, data, [row]) for row in (0, 1))
    right = (first * 1 + second * 3) / 4  # the case's 2.0 and 1.0 give 1.25
    assert reference(model, data, [0, 1]) == pytest.approx(right, rel=1e-9)
    assert loss == pytest.approx(right, rel=1e-6)
    assert abs(first - second) > 0.01  # so that the mean of means, (first + second) / 2, is another number


def reference(model: torch.nn.Module, data: Any, rows: list[int]) -> float:
    """The token mean, row by row, from stock logits."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in (data[index] for index in rows):
            ids = torch.tensor(row.input_ids, dtype=torch.int64)[None]
            scores = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            chosen = torch.tensor(row.trained[1:])
            total -= float(scores.gather(1, ids[0, 1:, None])[chosen].sum())
            count += int(chosen.sum())
    return total / count


def test_last_short_window_divides_by_its_own_tokens() -> None:
    """5 rows in windows of 4: the second step holds one row and its loss is that row's own mean."""
    data = toy.rows([1, 9, 2, 4, 3])
    model = toy.tiny_model()
    job = toy.make_job(
        model,
        data,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-12,
        num_train_epochs=1,
    )
    records: list[dict[str, Any]] = []
    train_loop(job, Hooks(records.append, lambda state: None, StopRequest()), LoopState())
    steps = [job.order.rows_of(step) for step in (0, 1)]
    assert [len(step) for step in steps] == [4, 1]
    for record, rows in zip(records, steps, strict=True):
        assert record["trained_tokens"] == int(data.num_targets[rows].sum())
        assert record["loss"] == pytest.approx(reference(model, data, rows), rel=1e-5)
