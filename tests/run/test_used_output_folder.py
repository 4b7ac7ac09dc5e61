"""R09: an output folder that has something in it already; two runs in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from frugal.checkpoints.lock import RunLock
from frugal.checkpoints.resume import starting_point
from frugal.config import load_config
from frugal.errors import CheckpointError, ConfigError, DataError, Interrupted
from frugal.files import read_json
from frugal.run.train import train
from tests.support import runs

SHORT: dict[str, Any] = {"train": {"max_steps": 2}}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> tuple[Path, dict[str, Any]]:
    """A finished run of 2 steps, started where there was no folder."""
    root = tmp_path_factory.mktemp("R09")
    config = runs.config(tiny_llama_folder, runs.write_rows(root / "rows.jsonl"), root / "new" / "run", **SHORT)
    assert train(config).steps == 2
    return root, config


def at(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**config, "output": {**config["output"], "dir": str(folder)}}


@pytest.mark.parametrize("resume", [None, True])
def test_empty_or_logs_only_starts(done: tuple[Path, dict[str, Any]], tmp_path: Path, resume: bool | None) -> None:
    (tmp_path / "train_log.jsonl").write_text('{"step": 1, "loss": 9}\n{"step": 2')
    (tmp_path / "out.log").write_text("the scheduler's own log")
    assert train(at(done[1], tmp_path), resume=resume).steps == 2
    assert [record["step"] for record in runs.records(tmp_path)] == [1, 2]
    assert runs.records(tmp_path)[0]["loss"] < 9
    assert (tmp_path / "out.log").read_text() == "the scheduler's own log"


def test_same_config_resumes_only_when_asked(done: tuple[Path, dict[str, Any]]) -> None:
    root, config = done
    before = _content(root / "new" / "run")
    with pytest.raises(CheckpointError) as caught:
        train(config)
    message = str(caught.value)
    assert "1 checkpoint(s), the newest checkpoint-2" in message
    assert "--resume" in message
    assert "output.dir" in message
    assert _content(root / "new" / "run") == before


def test_resuming_a_finished_run_says_so_at_once(
    done: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """U12: no model is loaded, nothing is written, and what the run reached is returned."""
    root, config = done
    folder = root / "new" / "run"
    before = _content(folder)
    monkeypatch.setattr("frugal.run.train.load_model", None)
    result = train(config, resume=True)
    assert capsys.readouterr().out.endswith("is finished: all 2 steps are done. Nothing is left to train.\n")
    assert (result.steps, result.final_loss) == (2, runs.records(folder)[-1]["loss"])
    assert result.peak_memory_bytes == read_json(folder / "manifest.json")["result"]["peak_memory_bytes"] > 0
    assert _content(folder) == before
    shutil.copytree(folder, root / "unfinished")
    (root / "unfinished" / "adapter_model.safetensors").unlink()  # killed between the last step and the last save
    monkeypatch.undo()
    assert train(at(config, root / "unfinished"), resume=True).steps == 2
    assert (root / "unfinished" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_while_loading(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """U12: one line that says what was going on and what stands; the lock is gone."""

    def load(*_: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not arrive")

    monkeypatch.setattr("frugal.run.train.load_model", load)
    config = at(done[1], tmp_path / "run")
    with pytest.raises(Interrupted, match=r"while loading the model: No step was done, nothing is saved\.$") as caught:
        train(config)
    assert caught.value.exit_code == code
    assert not (tmp_path / "run" / "run.lock").exists()
    assert read_json(tmp_path / "run" / "manifest.json")["status"] == "interrupted"


def test_another_config_is_refused_with_the_differences(done: tuple[Path, dict[str, Any]]) -> None:
    root, config = done
    before = _content(root / "new" / "run")
    other = {**config, "lora": {**config["lora"], "r": 8}}
    for resume in (None, True):
        with pytest.raises(CheckpointError, match=r"lora\.r: 4 -> 8"):
            train(other, resume=resume)
    assert _content(root / "new" / "run") == before


def test_a_finished_adapter_without_checkpoints_is_not_overwritten(
    done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, config = done
    shutil.copy(root / "new" / "run" / "adapter_model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match="a finished adapter"):
        train(at(config, tmp_path))


def test_a_checkpoint_that_is_not_there(done: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder.*checkpoint-2"):
        train(done[1], resume="checkpoint-7")


def test_second_process_is_refused_at_once_and_the_first_left_alone(
    done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    with RunLock(tmp_path):
        before = _content(tmp_path)
        with pytest.raises(CheckpointError, match="in use by process"):
            train(at(done[1], tmp_path))
        assert _content(tmp_path) == before


def test_output_dir_is_a_file(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        train(at(done[1], tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"cannot write to output\.dir"):
        train(at(done[1], tmp_path / "run" / "below"))


def test_wrong_input_leaves_no_folder(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    config = at(done[1], tmp_path / "run")
    config["data"] = {**config["data"], "train": str(tmp_path / "missing.jsonl")}
    with pytest.raises(DataError):
        train(config)
    assert list(tmp_path.iterdir()) == []


def test_in_another_thread(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(train(at(done[1], tmp_path)).steps))
    thread.start()
    thread.join()
    assert found == [2]


def _content(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_folder_can_have(tmp_path: Path, name: str) -> None:
    """U21: NUL, and what is too long, in output.dir."""
    with pytest.raises(CheckpointError, match=r"output\.dir .* cannot be a folder: "):
        starting_point(tmp_path / name, {}, None)
    with pytest.raises(ConfigError, match="must not hold the character NUL"):
        load_config({"model": {"base": "b"}, "data": {"train": "r"}, "output": {"dir": "a\0b"}})
