"""KTO: its definition, its KL term over the whole step, its rows; equal to TRL in test_equal_to_trl.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frugal.config import ObjectiveSection
from frugal.data import TokenDataset, build, preview_rows
from frugal.errors import ConfigError, DataError
from frugal.models.attention import use_attention
from frugal.objectives import LossModule, configured_objective
from frugal.training.evaluate import evaluate_rows, first_pass
from tests.support.preference import JUDGED, PAIRS, job, lora_llama, pairs, steps
from tests.support.rows import byte_tokenizer, section, write_rows

SETTINGS = {"name": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}


def objective(**changes: Any) -> Any:
    return configured_objective(ObjectiveSection.model_validate(SETTINGS), **changes)


def sums_by_stock(model: Any, data: TokenDataset) -> torch.Tensor:
    """Log-probabilities [rows, 2] of a row's own answer and of the other's, each document alone."""
    found = []
    for start, stop in zip(data.doc_starts, data.doc_starts[1:], strict=False):
        ids = torch.from_numpy(data.input_ids[start:stop].astype("int64"))
        trained = torch.from_numpy(data.trained[start:stop].copy())[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, ids[1:, None])[trained].sum())
    return torch.stack(found).view(-1, 2)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_loss_and_gradients_are_the_definition(tmp_path: Path, flat: bool, sign: int) -> None:
    """With a KL term above 0, and clamped: ``sign`` -1 turns the adapter round."""
    model, data = lora_llama(), pairs(tmp_path, objective="kto")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter *= sign * 0.5
    with model.disable_adapter(), torch.no_grad():
        base = sums_by_stock(model, data)
    moved = sums_by_stock(model, data) - base
    kl = moved[:, 1].mean().detach().clamp(min=0)
    good = torch.tensor([True, False, True, False])
    reward = 0.3 * (moved[:, 0] - kl)
    losses = torch.where(good, 1.5 * (1 - reward.sigmoid()), 0.7 * (1 - (-reward).sigmoid()))
    losses.sum().backward()
    want = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if flat:
        assert use_attention(model.get_base_model()).value == "frugal"
    kto = objective(flat=flat)
    module = LossModule(model.train(), kto)
    total, sums = module(kto.collate(data, [0, 1, 2, 3]))
    total.backward()
    assert total.item() == pytest.approx(losses.sum().item(), rel=2e-5)
    for key, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, want[key], rtol=1e-3, atol=2e-5)
    shown = kto.metrics(sums.tolist(), training=True)
    assert shown["kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert shown["rewards/chosen"] == pytest.approx(0.3 * moved[good, 0].mean().item(), rel=1e-4)
    assert shown["rewards/margins"] == pytest.approx(shown["rewards/chosen"] - shown["rewards/rejected"])


def test_micro_batches_change_neither_a_step_nor_evaluation(tmp_path: Path) -> None:
    """The KL term is of the whole step: planted, that of a micro-batch gives another loss."""
    data = pairs(tmp_path, objective="kto")
    found = []
    for size, times in ((4, 1), (1, 4), (3, 2)):
        made = job(lora_llama().double(), data, SETTINGS, per_device_train_batch_size=size,
                   gradient_accumulation_steps=times, max_steps=3, learning_rate=1e-3)  # fmt: skip
        found.append(steps(made))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            for key in ("loss", "kl", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins"):
                assert one[key] == pytest.approx(two[key], rel=1e-6, abs=1e-9), key
    assert found[0][0]["kl"] > 0
    kto, cpu = made.module.objective, torch.device("cpu")
    shown = [evaluate_rows(made.module, data, kto, batch_size=size, device=cpu).metrics for size in (1, 3)]
    assert shown[0] == pytest.approx(shown[1], rel=1e-6)
    whole, _ = made.module(kto.collate(data, [0, 1, 2, 3]))
    parts = [kto.collate(data, [row]) for row in range(4)]
    figure = first_pass(made.module, kto, parts, 1)
    assert sum(made.module(kto.second_pass(one, figure))[0].item() for one in parts) == pytest.approx(whole.item())
    assert abs(sum(made.module(one)[0].item() for one in parts) - whole.item()) > 1e-4


def test_a_batch_without_targets_adds_exactly_nothing(tmp_path: Path) -> None:
    data, kto = pairs(tmp_path, objective="kto"), objective()
    model = lora_llama().train()
    total, sums = LossModule(model, kto)(kto.without_targets(kto.collate(data, [0, 2])))
    total.backward()
    assert total.item() == 0
    assert not sums.any()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def texts(data: TokenDataset, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(data.input_ids[a:b]) for a, b in zip(data.doc_starts, data.doc_starts[1:], strict=False)]


def test_the_other_answer_is_of_another_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": " one", "label": 1},
        {"prompt": "p", "completion": " two", "label": "false"},
        {"prompt": "q", "completion": " three", "label": True},
    ]
    data = pairs(tmp_path, rows, "kto")
    end = "<|endoftext|>"
    tokenizer = byte_tokenizer(template=None, eos=end)
    want = [("p one", "p three"), ("p two", "p three"), ("q three", "q two")]
    assert texts(data, tokenizer) == [text + end for row in want for text in row]
    assert data.good.tolist() == [True, True, False, False, True, True]
    path = write_rows(tmp_path / "again.jsonl", rows)
    cached = [
        build(section(path, cache=True), tokenizer, seed=0, vocab_size=300, objective="kto", cache_dir=tmp_path / "c")
        for _ in range(2)
    ]
    assert cached[1].cache_hits == 1
    assert np.array_equal(cached[1].train.good, data.good)


def test_rows_of_turns_and_limits(tmp_path: Path) -> None:
    chat = {
        "prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "early"},
                   {"role": "user", "content": "last"}],
        "completion": [{"role": "assistant", "content": "yes"}], "label": False,
    }  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", [chat, {"prompt": "x", "completion": "a long answer", "label": True}])
    tokenizer = byte_tokenizer()
    whole = build(section(path), tokenizer, seed=0, vocab_size=300, objective="kto").train
    ids, mask = whole[0].input_ids, whole[0].trained
    assert tokenizer.decode(ids[: whole[0].doc_starts[1]][mask[: whole[0].doc_starts[1]]]) == "yes<|im_end|>"
    short = build(section(path, max_length=int(whole.document_lengths[0]) - 1), tokenizer, seed=0, vocab_size=300,
                  objective="kto").train  # fmt: skip
    assert "early" not in texts(short, tokenizer)[0]
    assert "yes" in texts(short, tokenizer)[0]
    assert short.document_lengths.max() < whole.document_lengths[0]
    shown = preview_rows(section(path), tokenizer, seed=0, objective="kto")
    assert [row.title.rsplit(" ", 1)[1] for row in shown.rows] == ["bad", "good"]


@pytest.mark.parametrize("label", ["maybe", 0.5, 2, [True]])
def test_a_label_that_is_no_verdict_is_refused(tmp_path: Path, label: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "c", "label": label}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: `label` .*neither true/false nor 0/1"):
        build(section(path), byte_tokenizer(), seed=0, vocab_size=300, objective="kto")


@pytest.mark.parametrize(
    ("row", "name", "said"),
    [
        (JUDGED[0], "sft", "name: kto"),
        (JUDGED[0], "dpo", "name: kto"),
        (PAIRS[0], "kto", "name: dpo"),
        ({"prompt": "p", "completion": "c"}, "kto", "name: sft"),
    ],
)
def test_the_wrong_objective_is_one_message(tmp_path: Path, row: dict[str, Any], name: str, said: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigError) as refused:
        build(section(path), byte_tokenizer(), seed=0, vocab_size=300, objective=name)
    assert "a.jsonl:1" in str(refused.value)
    assert f"objective:\n  {said}" in str(refused.value)
