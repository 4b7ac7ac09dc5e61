"""G02: evaluation holds no logits: memory does not depend on the number of rows, the loss not on the batch size."""

from __future__ import annotations

import math

import pytest
import torch

from frugal.memory.meter import LiveBytesMeter
from frugal.objectives import LossModule
from frugal.objectives.causal_lm import perplexity
from frugal.training.evaluate import EvalResult, evaluate_rows
from tests.support import training as toy

LARGE = 50_000


def run(module: LossModule, data: object, batch_size: int) -> EvalResult:
    return evaluate_rows(
        module,
        data,  # type: ignore[arg-type]
        module.objective,
        batch_size=batch_size,
        device=torch.device("cpu"),
    )


def test_peak_is_independent_of_the_number_of_rows() -> None:
    model = toy.tiny_model(vocab_size=LARGE)
    module = LossModule(model)
    peaks = {}
    for count in (20, 200):
        data = toy.rows([3] * count)
        with LiveBytesMeter(module) as meter:
            run(module, data, 2)
        peaks[count] = meter.peak_bytes
    assert peaks[200] <= peaks[20] * 1.01 + 10_000
    # below the logits of one batch kept for all rows by far: 20 rows x 12 tokens x 50,000 x 4 bytes are 48 MB
    fixed = sum(p.numel() * p.element_size() for p in model.parameters())
    assert peaks[200] - fixed < 20 * 12 * LARGE * 4


def test_loss_is_the_token_mean_for_any_batch_size_with_dropout_off() -> None:
    model = toy.tiny_model(dropout=0.5)
    module = LossModule(model).train()
    data = toy.rows([1, 9, 2, 4, 5, 1, 7])
    results = [run(module, data, batch_size) for batch_size in (1, 2, 3, 7, 50)]  # 2 and 3 end with a batch of one row
    assert module.training
    total = count = 0.0
    model.eval()
    with torch.no_grad():
        for index in range(len(data)):
            ids = torch.tensor(data[index].input_ids, dtype=torch.int64)[None]
            scores = -model(input_ids=ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])
            chosen = torch.tensor(data[index].trained[1:])
            total, count = total + float(scores[chosen].sum()), count + int(chosen.sum())
    for result in results:
        assert result.loss == pytest.approx(total / count, rel=1e-6)
        assert (result.tokens, result.rows) == (29, 7)
        assert result.metrics["perplexity"] == pytest.approx(math.exp(result.loss), rel=1e-12)


def test_perplexity_of_a_hopeless_loss_is_infinite() -> None:
    assert perplexity(1000.0) == float("inf")
