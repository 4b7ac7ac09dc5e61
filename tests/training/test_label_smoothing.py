"""train.label_smoothing: torch's definition in training, over the tokens of the whole step; evaluation stays plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from frugal.objectives import OBJECTIVES, LossModule, make_objective
from frugal.training.loop import train_loop
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from tests.support import training as toy


def torch_loss(model: torch.nn.Module, batch: dict[str, Any], smoothing: float) -> torch.Tensor:
    """Summed over the batch's targets."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum")


def test_training_is_smoothed_and_evaluation_is_plain() -> None:
    model = toy.tiny_model()
    objective = make_objective(label_smoothing=0.2)
    module = LossModule(model, objective, chunk_tokens=5)
    data = toy.rows([3, 7, 1])
    batch = objective.collate(data, [0, 1, 2])
    for smoothing, mode in ((0.2, True), (0.0, False)):
        module.train(mode)
        model.zero_grad()
        loss, sums = module(batch)
        loss.backward()
        got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        want = torch_loss(model, batch, smoothing)
        want.backward()
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        assert sums.tolist() == pytest.approx([want.item(), objective.targets(data, [0, 1, 2])], rel=1e-6)
        assert got
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-5)


def test_the_loop_trains_the_smoothed_loss_and_reports_the_plain_one_of_evaluation() -> None:
    model = toy.tiny_model()
    job = toy.make_job(
        model, toy.rows([3, 5, 2, 6]), eval_rows=toy.rows([4, 4], seed=1), label_smoothing=0.3, max_steps=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-9,
    )  # fmt: skip
    records: list[dict[str, Any]] = []
    train_loop(job, Hooks(records.append, lambda state: None, StopRequest()), LoopState())
    model.eval()
    with torch.no_grad():
        for record, rows, key, smoothing in (
            (records[1], job.rows, "loss", 0.3),
            (records[1], job.eval_rows, "eval_loss", 0.0),
        ):
            assert rows is not None
            every = range(len(rows))
            batch = job.objective.collate(rows, every)
            mean = torch_loss(model, batch, smoothing) / job.objective.targets(rows, every)
            assert record[key] == pytest.approx(mean.item(), rel=1e-5)


def test_every_objective_is_registered_under_its_name() -> None:
    assert all(name == each.name for name, each in OBJECTIVES.items())
    assert make_objective().name == "sft"
