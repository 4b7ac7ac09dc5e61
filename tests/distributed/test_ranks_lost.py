"""Ranks wait for one that is slow, however slow, and not for one that is dead: the message names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from frugal.checkpoints.complete import find_latest
from tests.distributed.ranks.harness import Outcomes, run_cases
from tests.support import runs

LOST = {
    "first": (15, "process 0 of 2"),
    "error": (15, "has stopped: MemoryError: the loader took it all"),
    "step": (15, "process 1 of 2"),
    "silent": (15, "did not answer: process 1 of 2"),
    "remote": (15, "did not answer: process 0 of 2 (pid"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    cases = ["slow_first", "names", "again", *(f"lost_{case}" for case in LOST)]
    # the store outlives rank 0, as under torchrun: it is not the closed connection that tells of its end
    folder = tmp_path_factory.mktemp("ranks")
    return run_cases(folder, "cases_ranks", cases, TORCHELASTIC_USE_AGENT_STORE="True")


def test_a_slow_rank_is_waited_for_without_a_time_limit(outcomes: Outcomes) -> None:
    for report in outcomes["slow_first"].reports:
        assert report == {"found": 41, "gathered": [0, 1], "any": 1}


def test_a_second_try_in_the_same_processes(outcomes: Outcomes) -> None:
    for report in outcomes["again"].reports:
        assert report == {"first": "ConfigError", "gathered": [0, 1]}


def test_one_of_three_is_named_by_both_others(tmp_path: Path) -> None:
    outcomes = run_cases(tmp_path, "cases_ranks", ["lost_one_of_three"], world=3)
    for report in outcomes["lost_one_of_three"].reports:
        assert report["error"] == "ProcessLost"
        assert "process 2 of 3" in report["text"]


def test_objects_go_through_the_host(outcomes: Outcomes) -> None:
    reports = outcomes["names"].reports
    assert [report["backend"] for report in reports] == ["gloo", "gloo"]
    for report in reports:
        assert report["name"].startswith(f"process 1 of 2 (pid {reports[1]['pid']} on ")


def check(report: dict[str, object], case: str) -> None:
    seconds, text = LOST[case]
    assert report["error"] == "ProcessLost"
    assert text in str(report["text"])
    assert "--resume" in str(report["text"])
    assert float(str(report["seconds"])) < seconds


@pytest.mark.parametrize("case", LOST)
def test_a_lost_rank_is_named(outcomes: Outcomes, case: str) -> None:
    (report,) = outcomes[f"lost_{case}"].reports
    check(report, case)


def test_a_rank_killed_while_it_saves(tmp_path: Path, make_tiny_llama: Callable[..., Path]) -> None:
    """The last complete checkpoint stands, the half one is none; the other rank leaves soon, with a message."""
    rows = runs.write_rows(tmp_path / "rows.jsonl")
    config = runs.config(make_tiny_llama(), rows, tmp_path / "run", output={"save_steps": 2})
    outcomes = run_cases(
        tmp_path / "cases",
        "cases_ranks",
        ["lost_save"],
        RUN_CONFIG=json.dumps(config),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    (report,) = outcomes["lost_save"].reports
    assert report["error"] == "ProcessLost"
    assert "process 0 of 2" in report["text"]
    latest = find_latest(tmp_path / "run")
    assert latest is not None
    assert latest.name == "checkpoint-2"
    assert not (tmp_path / "run" / "checkpoint-4").exists()


def test_a_lost_store_is_noticed(tmp_path: Path) -> None:
    """Started without torchrun, rank 0 keeps the store."""
    (report,) = run_cases(tmp_path, "cases_ranks", ["lost_first"])["lost_first"].reports
    check(report, "first")
