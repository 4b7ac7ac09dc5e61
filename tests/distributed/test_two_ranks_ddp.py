"""S01 and S02 under data parallelism: two ranks train one adapter, which is what one process trains, saved whole."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from frugal.files import read_json
from frugal.run.train import train
from frugal.training.log import read_log
from tests.support import launch, runs

MORE: dict[str, Any] = {
    "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "modules_to_save": ["lm_head"]},
    "data": {"eval_split": 4, "packing": False},
    "train": {"max_steps": 6, "eval_steps": 3},
}


def write(root: Path, name: str, base: Path, **changes: Any) -> tuple[Path, Path, dict[str, Any]]:
    """(configuration file, run folder, configuration)"""
    rows = root / "rows.jsonl"
    if not rows.exists():
        runs.write_rows(rows, 24)
    sections = {key: {**value, **changes.get(key, {})} for key, value in MORE.items()}
    config = runs.config(base, rows, root / name, **sections)
    config["output"].update(save_steps=3, save_total_limit=None)
    file = root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file, root / name, config


@pytest.fixture(scope="module")
def base(make_tiny_llama: Any) -> Path:
    return make_tiny_llama(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, Path, Path]:
    """(root, run of one process, run of two ranks), the same global batch of 2 rows."""
    root = tmp_path_factory.mktemp("S02")
    _, one, config = write(root, "one", base)
    train(config)
    file, two, _ = write(root, "two", base, train={"gradient_accumulation_steps": 1})
    launch.finish(launch.start_ranks("train", str(file)))
    return root, one, two


def test_two_ranks_train_what_one_process_trains(both: tuple[Path, Path, Path]) -> None:
    _, one, two = both
    first, second = runs.records(one), runs.records(two)
    assert len(first) == len(second) == 7
    for mine, theirs in zip(first, second, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (one, two))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert read_json(two / "manifest.json")["device"]["processes"] == 2


@pytest.mark.parametrize("where", ["", "checkpoint-3", "checkpoint-6"])
def test_the_saved_adapter_is_whole_and_holds_no_base(both: tuple[Path, Path, Path], where: str) -> None:
    _, one, two = both
    files = [folder / where / "adapter_model.safetensors" for folder in (one, two)]
    alone, shared = (load_file(file) for file in files)
    assert {name: tensor.shape for name, tensor in alone.items()} == {n: t.shape for n, t in shared.items()}
    assert all(tensor.numel() > 0 for tensor in shared.values())
    assert any("lm_head" in name for name in shared)
    assert any("lora_B" in name and tensor.any() for name, tensor in shared.items())
    assert files[0].stat().st_size == files[1].stat().st_size
    if where:  # adapter and two moments of its size; the tiny model's tokenizer and random state are small things apart
        adapter = sum(tensor.nbytes for tensor in shared.values())
        written = {path.name: path.stat().st_size for path in (two / where).iterdir()}
        assert written["adapter_model.safetensors"] + written["optimizer.safetensors"] <= 1.1 * 3 * adapter
        assert not set(written) & {"model.safetensors", "pytorch_model.bin"}


def test_one_process_goes_on_where_two_ranks_stopped(both: tuple[Path, Path, Path], base: Path) -> None:
    root, _, two = both
    _, folder, config = write(root, "on-one", base)
    folder.mkdir()
    shutil.copytree(two / "checkpoint-3", folder / "checkpoint-3")
    shutil.copy(two / "train_log.jsonl", folder)
    train(config, resume=True)
    last, whole = runs.records(folder)[-1], runs.records(two)[-1]
    assert last["rows_sha256"] == whole["rows_sha256"]
    assert last["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert last["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)


def test_resume_on_two_ranks_is_bit_equal_also_with_dropout(both: tuple[Path, Path, Path], base: Path) -> None:
    """The ranks' noise differs, the adapters they hold do not: each run checks that at its start."""
    root, _, _ = both
    changes = {"lora": {"lora_dropout": 0.2}, "train": {"gradient_accumulation_steps": 1}}
    file, whole, _ = write(root, "noise", base, **changes)
    launch.finish(launch.start_ranks("train", str(file)))
    file, folder, _ = write(root, "noise-again", base, **changes)
    folder.mkdir()
    shutil.copytree(whole / "checkpoint-3", folder / "checkpoint-3")
    shutil.copy(whole / "train_log.jsonl", folder)
    launch.finish(launch.start_ranks("train", str(file), "--resume"))
    runs.same_result(folder, whole)


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(both: tuple[Path, Path, Path], base: Path) -> None:
    root, _, _ = both
    file, folder, _ = write(root, "stopped", base, train={"gradient_accumulation_steps": 1, "max_steps": 3000})
    processes = launch.start_ranks("train", str(file))
    log = folder / "train_log.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (log.exists() and len(read_log(log)) > 3):
        assert all(process.poll() is None for process in processes), launch.finish(processes)
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    errors = launch.finish(processes, code=143, timeout=600)
    assert "Go on with --resume" in errors[0]
    steps = [int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")]
    assert max(steps) == read_log(log)[-1]["step"]
    assert not (folder / "run.lock").exists()
