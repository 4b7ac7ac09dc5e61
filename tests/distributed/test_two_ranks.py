"""Two processes (gloo) train what one does, and fail together: S02 (same adapters), R07 (nobody is left waiting)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frugal.training.loop import train_loop
from frugal.training.optim import trainable
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from tests.distributed.ranks import two_ranks
from tests.support import training as toy


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    """What the two processes wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, two_ranks.__file__, str(folder)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    return (
        [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)],
        [load_file(folder / f"{rank}.safetensors") for rank in range(2)],
    )


def test_same_losses_gradients_and_weights_as_one_process(outcome: Any) -> None:
    reports, weights = outcome
    model = toy.tiny_model()
    job = toy.make_job(
        model,
        toy.rows(two_ranks.TARGETS),
        eval_rows=toy.rows([2, 1, 5], seed=3),
        per_device_train_batch_size=2,
        **two_ranks.SETTINGS,
    )
    records: list[dict[str, Any]] = []
    train_loop(job, Hooks(records.append, lambda state: None, StopRequest()), LoopState())
    assert reports[0]["world"] == 2
    assert reports[0]["backend"] == "gloo"
    assert len(records) == 5  # the evaluation before, and 2 epochs of a full and a short window
    for report in reports:
        assert len(report["records"]) == len(records)
        for theirs, mine in zip(report["records"], records, strict=True):
            assert theirs.keys() == mine.keys()
            for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "tokens", "trained_tokens"):
                if key in mine:
                    assert theirs[key] == pytest.approx(mine[key], rel=1e-5), (mine["step"], key)
            assert theirs.get("rows_sha256") == mine.get("rows_sha256")
    for name, parameter in trainable(model).items():
        assert torch.equal(weights[0][name], weights[1][name])
        assert torch.allclose(weights[0][name], parameter.detach(), atol=1e-5), name


def test_adapters_that_differ_stop_the_run_by_name(outcome: Any) -> None:
    reports, _ = outcome
    assert [report["same"] for report in reports] == ["", ""]
    assert [report["after"] for report in reports] == ["", ""]
    for report in reports:
        assert f"the first is {reports[1]['changed']}" in report["other"]


def test_an_error_on_the_first_rank_is_raised_on_all(outcome: Any) -> None:
    reports, _ = outcome
    assert [report["on_first"] for report in reports] == ["CheckpointError: disk full"] * 2
    assert [report["value"] for report in reports] == [41, 41]
    assert [report["stop"] for report in reports] == [143, 143]  # a signal to one rank stops all after the same step


def test_evaluation_is_shared(outcome: Any) -> None:
    reports, _ = outcome
    assert reports[0]["eval"] == reports[1]["eval"] == pytest.approx(reports[0]["records"][-1]["eval_loss"], rel=1e-6)
