"""Two ranks under data parallelism train on preferences what one process trains, and evaluate the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.ranks.cases_preference import NAMES, trained
from tests.distributed.ranks.harness import Outcomes, run_cases

SAME = ("grad_norm", "loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "rows_sha256", "trained_tokens")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(tmp_path_factory.mktemp("ranks"), "cases_preference", ["pairs"])


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one_process(outcomes: Outcomes, tmp_path: Path, name: str) -> None:
    two = outcomes["pairs"]
    records, shown, tensors = trained(tmp_path, name, 2)
    for rank, report in enumerate(two.reports):
        assert len(report[name]["records"]) == len(records) == 4
        for theirs, mine in zip(report[name]["records"], records, strict=True):
            for key in SAME:
                value = mine.get(key)
                if value is None:  # kto has no accuracy, and no margin where all answers of a step are good
                    assert key not in theirs
                    continue
                assert theirs[key] == (pytest.approx(value, rel=1e-6, abs=1e-9) if key in SAME[:5] else value), key
        assert report[name]["eval"] == pytest.approx(shown, rel=1e-6, abs=1e-9)
        for key, tensor in two.tensors(rank, name).items():
            torch.testing.assert_close(tensor, tensors[key].detach(), rtol=1e-6, atol=1e-6)
