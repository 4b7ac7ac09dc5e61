"""The harness itself: results of every rank, a failing case fails alone and shows the rank's error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks.harness import run_cases


def test_cases_are_independent(tmp_path: Path) -> None:
    outcomes = run_cases(tmp_path, "cases_harness", ["one_raises", "one_leaves", "sum"])
    assert [report["sum"] for report in outcomes["sum"].reports] == [3.0, 3.0]
    assert [report["rank"] for report in outcomes["sum"].reports] == [0, 1]
    assert float(outcomes["sum"].tensors(1)["value"]) == 3.0
    with pytest.raises(AssertionError, match="this rank has had enough"):
        outcomes["one_raises"]
    with pytest.raises(AssertionError, match="rank 1"):
        outcomes["one_leaves"]
