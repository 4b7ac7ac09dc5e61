"""R02: the learning rate after resume: identical for the same run, never silently re-planned for another."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from frugal.config import TrainSection
from frugal.errors import CheckpointError
from frugal.run.train import train
from frugal.training.schedule import lr_lambda, make_plan
from tests.support import runs

BASE: dict[str, Any] = {"output": {"save_steps": 5}, "train": {"max_steps": 10, "warmup_steps": 2}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> tuple[Path, dict[str, Any]]:
    """A run of 10 steps with checkpoints at 5 and 10."""
    root = tmp_path_factory.mktemp("R02")
    config = runs.config(tiny_llama_folder, runs.write_rows(root / "rows.jsonl"), root / "whole", **BASE)
    config["output"]["dir"] = str(root / "whole")
    train(config)
    return root, config


def half(root: Path, config: dict[str, Any], name: str) -> dict[str, Any]:
    """A folder that holds only the checkpoint of step 5, and the configuration that goes on there."""
    folder = root / name
    folder.mkdir()
    shutil.copytree(root / "whole" / "checkpoint-5", folder / "checkpoint-5")
    shutil.copy(root / "whole" / "train_log.jsonl", folder)
    return {**config, "output": {**config["output"], "dir": str(folder)}}


def test_same_config_gives_identical_rates(whole: tuple[Path, dict[str, Any]]) -> None:
    root, config = whole
    train(half(root, config, "same"), resume=True)
    runs.same_result(root / "same", root / "whole")
    rates = [record["learning_rate"] for record in runs.records(root / "same")]
    # by the formula: 2 steps up, then half a cosine over the other 8
    expected = [0.0, 0.5] + [0.5 * (1 + math.cos(math.pi * (step - 2) / 8)) for step in range(2, 10)]
    assert rates == pytest.approx([1e-2 * factor for factor in expected], rel=1e-12, abs=1e-15)


def test_fewer_rows_stop_with_the_differences(whole: tuple[Path, dict[str, Any]]) -> None:
    root, config = whole
    changed = half(root, config, "rows")
    runs.write_rows(root / "rows.jsonl", 12)
    try:
        with pytest.raises(CheckpointError) as caught:
            train(changed, resume=True)
    finally:
        runs.write_rows(root / "rows.jsonl")
    message = str(caught.value)
    assert "rows: 20 -> 12" in message
    assert "steps_per_epoch: 10 -> 6" in message
    assert not (root / "rows" / "run.lock").exists()
    assert not (root / "rows" / "manifest.json").exists()


def test_other_rows_of_the_same_number_are_noticed(whole: tuple[Path, dict[str, Any]]) -> None:
    root, config = whole
    changed = half(root, config, "other")
    runs.write_rows(root / "rows.jsonl", seed=1)
    try:
        with pytest.raises(CheckpointError, match="rows are not the same"):
            train(changed, resume=True)
    finally:
        runs.write_rows(root / "rows.jsonl")


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("max_steps", 20, "train.max_steps: 10 -> 20"),
        ("num_train_epochs", 6, "train.num_train_epochs: 3.0 -> 6.0"),
        ("learning_rate", 5e-3, "train.learning_rate: 0.01 -> 0.005"),
        ("gradient_accumulation_steps", 4, "global_batch: 2 -> 4"),
        ("optim", "adamw_8bit", "train.optim: adamw -> adamw_8bit"),
    ],
)
def test_a_changed_plan_stops(whole: tuple[Path, dict[str, Any]], key: str, value: Any, shown: str) -> None:
    root, config = whole
    changed = half(root, {**config, "train": {**config["train"], key: value}}, key)
    with pytest.raises(CheckpointError, match="saved -> now") as caught:
        train(changed, resume=True)
    assert shown in str(caught.value)


def test_the_cases_own_numbers() -> None:
    section = TrainSection(warmup_steps=0)
    hundred, sixty = (make_plan(section.model_copy(update={"max_steps": n}), rows=9, world_size=1) for n in (100, 60))
    assert lr_lambda(section, hundred)(50) == pytest.approx(0.5, abs=1e-12)
    assert lr_lambda(section, sixty)(50) == pytest.approx(0.067, abs=1e-3)
    assert lr_lambda(section, sixty)(70) == lr_lambda(section, sixty)(60) == pytest.approx(0.0, abs=1e-12)
