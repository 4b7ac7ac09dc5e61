"""FSDP2 computes what one process does, and everything is really sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Outcomes, run_cases
from sharded_runs import Setting, largest_difference, start

CASES = ["same_result"]


@pytest.fixture(scope="module", autouse=True)
def bases(make_tiny_llama: Callable[..., Path]) -> Iterator[dict[str, str]]:
    found = {
        "TINY_UNTIED": str(make_tiny_llama(num_hidden_layers=4, tie_word_embeddings=False)),
        "TINY_TIED": str(make_tiny_llama()),
    }
    before = dict(os.environ)
    os.environ.update(found)
    yield found
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def outcomes(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(tmp_path_factory.mktemp("fsdp2"), "cases_fsdp2", CASES)


def one_process(setting: Setting) -> Any:
    running = start(setting)
    running.train()
    return running


def test_same_result(outcomes: Outcomes) -> None:
    out = outcomes["same_result"]
    want = one_process(Setting())
    for report in out.reports:
        for got, record in zip(report["records"], want.records, strict=True):
            assert got["loss"] == pytest.approx(record["loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-5)
    print(largest_difference(out.tensors(0), want.adapter()))
    assert largest_difference(out.tensors(0), want.adapter()) < 1e-5
