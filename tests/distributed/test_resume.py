"""Saved by any strategy and number of processes, resumed by any other: same rows, losses and adapter, one file."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from frugal.run.train import train
from frugal.training.log import read_log
from tests.distributed.ranks.harness import Outcomes, run_cases
from tests.distributed.ranks.resumed_runs import STEPS, config, go_on_from
from tests.support.runs import write_rows

TWO = ["fsdp2", "fsdp2_again", "one_to_two", "adapters_only", "to_ddp", "eight_bit", "eight_bit_again", "blocks"]
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def place(make_tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY", str(make_tiny_llama(tie_word_embeddings=False)))
        patch.setenv("ROWS", str(write_rows(root / "rows.jsonl", 23)))
        patch.setenv("RUNS", str(root))
        yield root


@pytest.fixture(scope="module")
def one(place: Path) -> Path:
    """The run that nothing interrupts, in one process."""
    train(config(place / "one", 1))
    return place / "one"


@pytest.fixture(scope="module")
def two(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(tmp_path_factory.mktemp("two"), "cases_resume", TWO)


def check(run_dir: Path, one: Path, *, since: int = 0) -> None:
    """Log from ``since`` on, and adapter, are those of the run in one process."""
    mine, theirs = (
        {r["step"]: r for r in read_log(folder / "train_log.jsonl") if r["step"] > since} for folder in (run_dir, one)
    )
    assert list(mine) == list(theirs) == list(range(since + 1, STEPS + 1))
    for step, record in theirs.items():
        assert mine[step]["rows_sha256"] == record["rows_sha256"]
        for key in ("loss", "eval_loss"):
            if key in record:
                assert mine[step][key] == pytest.approx(record[key], abs=1e-5)
        assert mine[step]["learning_rate"] == record["learning_rate"]
    got, want = load_file(run_dir / ADAPTER), load_file(one / ADAPTER)
    assert got.keys() == want.keys()
    assert max(float((got[name] - want[name]).abs().max()) for name in want) < 1e-5


def test_files_are_those_of_one_process(two: Outcomes, one: Path, place: Path) -> None:
    assert two["fsdp2"].world == 2
    check(place / "fsdp2", one)
    for name in (ADAPTER, "checkpoint-3/" + ADAPTER, "checkpoint-3/optimizer.safetensors"):
        with safe_open(place / "fsdp2" / name, "pt") as got, safe_open(one / name, "pt") as want:
            assert sorted(got.keys()) == sorted(want.keys())
            assert got.metadata() == want.metadata()
            for key in want.keys():  # noqa: SIM118
                assert got.get_tensor(key).shape == want.get_tensor(key).shape
                assert got.get_tensor(key).dtype == want.get_tensor(key).dtype
                assert torch.allclose(got.get_tensor(key), want.get_tensor(key), atol=1e-5)
        assert (place / "fsdp2" / name).stat().st_size == (one / name).stat().st_size
    answers = [json.loads((folder / "samples.json").read_text()) for folder in (place / "fsdp2", one)]
    assert answers[0] == answers[1]
    assert answers[0][0]["before"]


def test_resumed_by_the_same_ranks_is_the_same_run_bit_for_bit(two: Outcomes, place: Path) -> None:
    for first, second in (("fsdp2", "fsdp2-again"), ("eight-bit", "eight-bit-again")):
        assert two[second.replace("-", "_")].world == 2
        got, want = load_file(place / second / ADAPTER), load_file(place / first / ADAPTER)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("case", "since"), [("one_to_two", 3), ("adapters_only", 6), ("to_ddp", 3)], ids=["one to two", "base whole", "DDP"]
)
def test_resumed_elsewhere(two: Outcomes, one: Path, place: Path, case: str, since: int) -> None:
    assert two[case].world == 2
    check(place / case.replace("_", "-"), one, since=since)


def test_resumed_by_one_process(two: Outcomes, one: Path, place: Path) -> None:
    assert two["fsdp2"].world == 2
    alone = go_on_from(place / "fsdp2", 3, place / "two-to-one")
    train(config(alone, 1), resume=True)
    check(alone, one, since=3)


def test_resumed_by_four(two: Outcomes, one: Path, place: Path, tmp_path: Path) -> None:
    assert two["fsdp2"].world == 2
    four = run_cases(tmp_path, "cases_resume", ["two_to_four"], world=4)
    assert four["two_to_four"].world == 4
    check(place / "two-to-four", one, since=3)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_resumed_by_zero3(two: Outcomes, one: Path, place: Path, tmp_path: Path) -> None:
    assert two["fsdp2"].world == 2
    assert run_cases(tmp_path, "cases_resume", ["to_zero3"])["to_zero3"].world == 2
    check(place / "to-zero3", one, since=3)


def test_eight_bit_state_on_and_off_blocks(two: Outcomes) -> None:
    for report in two["blocks"].reports:
        found: dict[str, dict[str, Any]] = report
        assert [name for name, row in found.items() if row["on_blocks"]] == ["on", "few"]
        for name in ("on", "few"):  # moved bit for bit, and the same numbers as one process
            assert found[name]["equal"]
            assert found[name]["kept"]
        for row in found.values():
            assert row["shapes_equal"]
            assert row["step"] == 3
            assert row["far"] < 0.025  # a step is 0.01: 8-bit moments, coded in other blocks
