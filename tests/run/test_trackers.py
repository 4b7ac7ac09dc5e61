"""A tracker that fails takes neither the training nor its end with it (F15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest

from frugal.errors import ConfigError
from frugal.run.train import train
from tests.support import runs


@pytest.fixture
def config(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Six steps that report to a tracker whose package is not needed."""
    config = runs.config(tiny_llama_folder, runs.write_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    config["train"].update(max_steps=6, report_to=["wandb"])
    config["output"].update(save_steps=3)
    monkeypatch.setattr("frugal.run.train.check_trackers", lambda names: None)
    monkeypatch.setattr(accelerate.Accelerator, "init_trackers", lambda *args, **kwargs: None)
    return config


def test_the_run_goes_on_when_one_fails(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[int] = []

    def log(self: Any, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        assert step is not None
        steps.append(step)
        if len(steps) in (3, 4):
            raise ConnectionError("tracker gone")

    ended: list[str] = []

    class Broken:
        def finish(self) -> None:
            ended.append("wandb")
            raise RuntimeError("no end")

    def start(self: Any, *_: Any, **__: Any) -> None:
        self.trackers = [Broken()]

    monkeypatch.setattr(accelerate.Accelerator, "log", log)
    monkeypatch.setattr(accelerate.Accelerator, "init_trackers", start)
    train(config)
    assert ended == ["wandb"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6  # tried again after it failed
    assert len(runs.records(tmp_path / "run")) == 6
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    text = capsys.readouterr().out
    assert text.count("warning: train.report_to: wandb failed (ConnectionError: tracker gone)") == 1


def test_one_that_cannot_start_is_said_before_weights_are_read(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("api key not configured")

    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(accelerate.Accelerator, "init_trackers", start)
    monkeypatch.setattr("frugal.run.train.load_model", loaded)
    with pytest.raises(ConfigError, match=r"wandb could not be started \(RuntimeError: api key not configured\)"):
        train(config)
