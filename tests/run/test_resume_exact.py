"""R01: resume in the middle of a later epoch, in a new process: the same rows, losses, rates and weights, bit for bit.

Also of R07: SIGTERM saves and leaves with 143, SIGKILL loses at most what came after the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from frugal.run.train import train
from frugal.training.log import read_log
from tests.support import runs

POINTS = {"plain": (3, 10, 14, 25), "packed": (10, 25)}
VARIANTS = {
    "plain": {"data": {"eval_split": 4}, "train": {"eval_steps": 7}},
    "packed": {"data": {"packing": True, "max_length": 48}, "train": {"optim": "adamw_8bit", "max_steps": 26}},
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> dict[str, Path]:
    """Uninterrupted runs made here, and the same ones resumed from each point in one new process."""
    root = tmp_path_factory.mktemp("R01")
    data = runs.write_rows(root / "rows.jsonl", 24)
    jobs, folders = [], {}
    for name, sections in VARIANTS.items():
        whole = root / f"{name}-whole"
        output = {"output": {"dir": str(whole), "save_steps": 1, "save_total_limit": None}}
        config = runs.config(tiny_llama_folder, data, whole, **sections, **output)
        train(config)
        folders[f"{name}-whole"] = whole
        for point in POINTS[name]:
            part = root / f"{name}-{point}"
            part.mkdir()
            shutil.copytree(whole / f"checkpoint-{point}", part / f"checkpoint-{point}")
            log = (whole / "train_log.jsonl").read_text().splitlines(keepends=True)
            # what a killed process may have left: steps after its last checkpoint, and half a line
            (part / "train_log.jsonl").write_text("".join(log[: point + 4])[:-9])
            other = runs.config(tiny_llama_folder, data, part, **sections)
            other["output"] = {"dir": str(part), "save_steps": 4}  # saving otherwise is allowed
            other["data"] = {**other["data"], "num_proc": 2 if point == 14 else 1}
            jobs.append((other, True))
            folders[f"{name}-{point}"] = part
    # the same global batch with another micro-batch
    micro = root / "micro"
    micro.mkdir()
    shutil.copytree(folders["plain-whole"] / "checkpoint-14", micro / "checkpoint-14")
    shutil.copy(folders["plain-whole"] / "train_log.jsonl", micro / "train_log.jsonl")
    other = runs.config(tiny_llama_folder, data, micro, **VARIANTS["plain"])
    other["train"] = {**other["train"], "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    jobs.append((other, str(micro / "checkpoint-14")))
    folders["micro"] = micro

    # killed and stopped runs of the command line; resuming the stopped one is a resume of a resume
    for name, number in (("term", signal.SIGTERM), ("kill", signal.SIGKILL)):
        folder = root / name
        config = runs.config(tiny_llama_folder, data, folder, **VARIANTS["plain"])
        config["output"] = {"dir": str(folder), "save_steps": 3}
        file = root / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        if name == "term":
            shutil.copytree(folders["plain-whole"] / "checkpoint-3", folder / "checkpoint-3")
            shutil.copy(folders["plain-whole"] / "train_log.jsonl", folder / "train_log.jsonl")
        process = runs.start_cli("train", str(file), *(["--resume"] if name == "term" else []))
        _wait_past(process, folder, 6 if name == "kill" else 3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == (143 if name == "term" else -9), _tail(errors)
        if name == "term":
            assert "Go on with --resume" in errors
            assert not (folder / "run.lock").exists()
        else:
            assert (folder / "run.lock").exists()
        jobs.append((config, True))
        folders[name] = folder

    (root / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(Path(runs.__file__).parent / "resume_script.py"), str(root / "jobs.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, _tail(done.stderr)
    folders["output"] = root / "output.txt"
    folders["output"].write_text(done.stdout)
    return folders


def _wait_past(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until a run has done two steps after ``step``; a resumed one drops the old records first."""
    log = folder / "train_log.jsonl"
    while process.poll() is None:
        steps = [record["step"] for record in read_log(log)] if log.exists() else []
        if steps[-1:] and step + 2 <= steps[-1] < 30:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
    raise AssertionError(f"{folder.name} ended with {process.returncode}: {_tail(process.communicate()[1])}")


def _tail(errors: str) -> str:
    """The end of what a process wrote to stderr: its traceback, behind hundreds of progress lines."""
    return f"...{errors[-4000:]}" if len(errors) > 4000 else errors


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_in_a_new_process_is_bit_equal(resumed: dict[str, Path], variant: str) -> None:
    for point in POINTS[variant]:
        runs.same_result(resumed[f"{variant}-{point}"], resumed[f"{variant}-whole"])


def test_every_row_once_an_epoch_in_different_orders(resumed: dict[str, Path]) -> None:
    hashes = [record["rows_sha256"] for record in runs.records(resumed["plain-whole"]) if "rows_sha256" in record]
    assert len(hashes) == 30
    assert hashes[:10] != hashes[10:20] != hashes[20:]


def test_a_stopped_resume_and_a_killed_run_resume_bit_equal(resumed: dict[str, Path]) -> None:
    runs.same_result(resumed["term"], resumed["plain-whole"])
    runs.same_result(resumed["kill"], resumed["plain-whole"])
    assert "removed a stale lock" in resumed["output"].read_text()


def test_another_micro_batch_of_the_same_global_batch(resumed: dict[str, Path]) -> None:
    """The same rows in the same steps and the same losses up to rounding; dropout falls otherwise."""
    whole, micro = (runs.records(resumed[name]) for name in ("plain-whole", "micro"))
    assert [r.get("rows_sha256") for r in whole] == [r.get("rows_sha256") for r in micro]
    assert [r.get("learning_rate") for r in whole] == [r.get("learning_rate") for r in micro]
    assert micro[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=0.2)


def test_checkpoints_are_not_much_larger_than_what_they_must_hold(resumed: dict[str, Path]) -> None:
    folder = resumed["plain-whole"] / "checkpoint-30"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    must = sizes["adapter_model.safetensors"] * 3  # the adapter, and two moments of its size
    assert sizes["adapter_model.safetensors"] + sizes["optimizer.safetensors"] <= 1.1 * must + 20_000
