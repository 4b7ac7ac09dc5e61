"""Only complete checkpoints of the run itself count, for the newest and for the limit; nothing else goes (U17)."""

from __future__ import annotations

import shutil
from pathlib import Path

from frugal.checkpoints.rotation import list_checkpoints
from frugal.run.train import train
from tests.support import runs


def test_strangers_stay_and_good_checkpoints_too(tiny_llama_folder: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_llama_folder, runs.write_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    config["train"].update(max_steps=4)
    config["output"].update(save_steps=2, save_total_limit=1)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run / "checkpoint-1", run / "checkpoint-2", run / "checkpoint-999", elsewhere):
        folder.mkdir(parents=True)
        (folder / "thesis.txt").write_text("years of work")
    (run / "checkpoint-4").symlink_to(elsewhere)
    (run / "checkpoint-5").symlink_to(elsewhere)
    train(config)
    assert [step for step, folder in list_checkpoints(run) if (folder / "complete.json").is_file()] == [4]
    kept = sorted(path.parent.relative_to(run).as_posix() for path in run.glob("*/thesis.txt"))
    assert [name.split(".")[0] for name in kept] == [
        "checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-5", "checkpoint-999",
    ]  # fmt: skip
    assert (elsewhere / "thesis.txt").is_file()
    assert len(list(elsewhere.iterdir())) == 1  # nothing was written through the link
    assert not (run / "checkpoint-4").is_symlink()


def test_a_damaged_one_with_the_highest_number_pushes_nothing_out(tiny_llama_folder: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_llama_folder, runs.write_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    config["train"].update(max_steps=6)
    config["output"].update(save_steps=2, save_total_limit=None)
    run = tmp_path / "run"
    train(config)
    shutil.copytree(run / "checkpoint-6", run / "checkpoint-99")
    (run / "checkpoint-99" / "optimizer.safetensors").unlink()
    for name in ("checkpoint-6", "adapter_model.safetensors"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    config["output"].update(save_total_limit=1)
    train(config, resume=True)
    complete = [step for step, folder in list_checkpoints(run)]
    assert complete == [6, 99]  # 2 and 4 went after 6 was whole; 99 is not this run's to delete
