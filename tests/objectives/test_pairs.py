"""Objectives over pairs: equal to their papers, and the same by micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.config import ObjectiveSection, TrainSection
from frugal.data import TokenDataset
from frugal.models.attention import use_attention
from frugal.objectives import LossModule, configured_objective
from frugal.objectives.pairs import METRICS, precompute_reference, without_adapter
from frugal.training.evaluate import evaluate_rows
from tests.conftest import make_llama
from tests.support.preference import job, lora_llama, pairs, steps


def answers_by_stock(model: Any, data: TokenDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums of log-probabilities, tokens) [pairs, 2] of the answers: each document alone, through stock logits."""
    found, counts = [], []
    for start, stop in zip(data.doc_starts, data.doc_starts[1:], strict=False):
        ids = torch.from_numpy(data.input_ids[start:stop].astype("int64"))
        trained = torch.from_numpy(data.trained[start:stop].copy())[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, ids[1:, None])[trained].sum())
        counts.append(trained.sum())
    return torch.stack(found).view(-1, 2), torch.stack(counts).view(-1, 2)


def by_definition(name: str, loss_type: str, policy: Any, reference: Any, n: Any, beta: float, e: float) -> Any:
    """One loss a pair, as the papers write it."""
    log = torch.nn.functional.logsigmoid
    mean = policy / n
    if name == "simpo":
        margin = beta * (mean[:, 0] - mean[:, 1]) - 0.3
        return -(1 - e) * log(margin) - e * log(-margin)
    if name == "orpo":
        odds = torch.log(mean.exp() / (1 - mean.exp()))
        return -mean[:, 0] - beta * log(odds[:, 0] - odds[:, 1])
    moved = policy - reference
    if loss_type == "ipo":
        return ((moved / n)[:, 0] - (moved / n)[:, 1] - 1 / (2 * beta)) ** 2
    margin = beta * (moved[:, 0] - moved[:, 1])
    return torch.relu(1 - margin) if loss_type == "hinge" else -(1 - e) * log(margin) - e * log(-margin)


CASES = [
    ("dpo", "sigmoid", 0.3, 0.0), ("dpo", "sigmoid", 0.3, 0.2), ("dpo", "ipo", 0.3, 0.0), ("dpo", "hinge", 0.05, 0.0),
    ("orpo", "sigmoid", 0.4, 0.0), ("simpo", "sigmoid", 2.5, 0.0), ("simpo", "sigmoid", 2.5, 0.1),
]  # fmt: skip


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("name", "loss_type", "beta", "e"), CASES)
def test_loss_and_gradients_are_the_definitions(
    tmp_path: Path, name: str, loss_type: str, beta: float, e: float, flat: bool
) -> None:
    model, data = lora_llama(), pairs(tmp_path)
    policy, n = answers_by_stock(model, data)
    with model.disable_adapter(), torch.no_grad():
        reference, _ = answers_by_stock(model, data)
    losses = by_definition(name, loss_type, policy, reference, n, beta, e)
    losses.sum().backward()
    want = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if flat:
        assert use_attention(model.get_base_model()).value == "frugal"
    asked = {"name": name, "loss_type": loss_type, "beta": beta, "label_smoothing": e, "simpo_gamma": 0.3}
    objective = configured_objective(ObjectiveSection.model_validate(asked), flat=flat)
    module = LossModule(model.train(), objective)
    total, sums = module(objective.collate(data, [0, 1, 2, 3]))
    total.backward()
    assert total.item() == pytest.approx(losses.sum().item(), rel=2e-5)
    assert set(want) == {key for key, p in model.named_parameters() if p.grad is not None}
    for key, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, want[key], rtol=1e-3, atol=2e-5)
    metrics = objective.metrics(sums.tolist(), training=True)
    assert metrics["logps/chosen"] == pytest.approx(policy[:, 0].mean().item(), rel=1e-5)
    if name == "dpo":
        margins = beta * (policy - reference)
        assert metrics["rewards/margins"] == pytest.approx((margins[:, 0] - margins[:, 1]).mean().item(), rel=1e-3)
    if e:  # evaluation is plain
        total, _ = module.eval()(objective.collate(data, [0, 1, 2, 3]))
        plain = by_definition(name, loss_type, policy, reference, n, beta, 0.0).sum().item()
        assert total.item() == pytest.approx(plain, rel=2e-5)


def test_a_batch_without_targets_adds_exactly_nothing(tmp_path: Path) -> None:
    model, data = lora_llama(), pairs(tmp_path)
    for name in ("dpo", "orpo", "simpo"):
        objective = configured_objective(ObjectiveSection.model_validate({"name": name}))
        total, sums = LossModule(model.train(), objective)(objective.without_targets(objective.collate(data, [0, 2])))
        total.backward()
        assert total.item() == 0
        assert not sums.any()
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo"])
def test_micro_batches_do_not_change_a_step_nor_its_metrics(tmp_path: Path, name: str) -> None:
    data = pairs(tmp_path)
    found = []
    for size, times in ((3, 1), (1, 3), (2, 2)):
        made = job(lora_llama(), data, {"name": name}, per_device_train_batch_size=size,
                   gradient_accumulation_steps=times, max_steps=3, learning_rate=1e-3)  # fmt: skip
        found.append(steps(made))
    # 3 + 1 rows an epoch, and 4: the first two have the same steps
    for one, other in zip(found[0], found[1], strict=True):
        for key in ("loss", "grad_norm", *METRICS):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    by_size = [
        evaluate_rows(made.module, data, made.module.objective, batch_size=size, device=torch.device("cpu")).metrics
        for size in (1, 3)
    ]
    assert by_size[0] == pytest.approx(by_size[1], rel=1e-4)
    assert set(by_size[0]) == {"loss", *METRICS}


def test_the_reference_is_the_base_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    model, data = lora_llama(), pairs(tmp_path)
    model.train()
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    base, _ = answers_by_stock(make_llama(), data)
    with without_adapter(model):
        assert not model.training
        off, _ = answers_by_stock(model, data)
    assert not off.requires_grad
    torch.testing.assert_close(off, base.detach())
    assert model.training
    assert before == {name: p.requires_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_reference_computed_beforehand_changes_nothing_but_the_passes(tmp_path: Path, name: str, flat: bool) -> None:
    found, passes = [], []
    for beforehand in (False, True):
        data = pairs(tmp_path, objective=name)
        made = job(lora_llama().double(), data, {"name": name, "precompute_reference": beforehand}, flat=flat,
                   per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2)  # fmt: skip
        objective = made.module.objective
        if beforehand:
            precompute_reference(made.module.head, data, objective, batch_documents=3, chunk_tokens=None,
                                 device=torch.device("cpu"))  # fmt: skip
            batch = objective.collate(data, [1, 2])
            shape = objective.batch_without_values(2, 8, documents=1, device=torch.device("cpu"))
            assert batch.keys() == shape.keys()
            assert batch["reference"].shape == shape["reference"].shape
        calls: list[int] = []
        handle = made.module.head.decoder.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        found.append(steps(made))
        handle.remove()
        passes.append(len(calls))
    for one, two in zip(*found, strict=True):
        for key in one.keys() - {"seconds", "tokens_per_second", "peak_memory_bytes", "rows_sha256"}:
            assert one[key] == pytest.approx(two[key], rel=1e-8, abs=1e-10), key
    assert passes == ([8, 4] if name == "dpo" else [16, 8])


def test_train_section_smoothing_is_of_tokens() -> None:
    smoothing = TrainSection(label_smoothing=0.2).label_smoothing
    assert configured_objective(ObjectiveSection(), label_smoothing=smoothing).label_smoothing == 0.2
    dpo = configured_objective(ObjectiveSection(name="dpo", label_smoothing=0.1), label_smoothing=smoothing)
    assert dpo.label_smoothing == 0.1
