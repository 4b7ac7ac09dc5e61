"""The quickstart shared by two processes, one goes on, merged: the adapter that one process trains alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frugal.config import load_config
from frugal.exports.registry import merge
from frugal.run.train import train
from tests.distributed.ranks.harness import ROOT
from tests.distributed.ranks.launched_runs import WITH_DEEPSPEED, accelerate_launch, launched

pytestmark = pytest.mark.model
CONFIG = ROOT / "configs" / "quickstart.yaml"
FEW = [
    *("train.max_steps=3", "train.per_device_train_batch_size=2", "train.eval_steps=1000", "data.eval_split=8"),
    *("data.max_length=128", "output.save_steps=1", "output.save_total_limit=null", "output.sample_prompts=[]"),
    *("train.adam_epsilon=1", "train.learning_rate=2", "train.logging_steps=1"),
]
"""Three steps of four rows instead of fifty of sixteen: minutes, not an hour. With so large an epsilon a step is linear
in the gradient: otherwise Adam makes a whole step of the sign of a gradient that is nothing but rounding."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "one"
    train(load_config(CONFIG, [*FEW, "train.gradient_accumulation_steps=2", f"output.dir={folder}"]))
    return folder


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def log(folder: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def same_steps(folder: Path, alone: Path) -> None:
    """Losses, norms of the gradients, and every adapter up to a part of what it moved after the first step."""
    assert len(log(alone)) == 3
    for mine, theirs in zip(log(folder), log(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    mine, theirs, before = adapter(folder), adapter(alone), adapter(alone / "checkpoint-1")
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        moved, apart = (tensor - before[name]).abs().max(), (mine[name] - tensor).abs().max()
        assert moved > 0, name
        assert apart <= 1e-3 * moved, f"{name} is {apart:.1e} apart, it moved by {moved:.1e}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero3", marks=WITH_DEEPSPEED)])
def test_two_processes_then_one_then_merged(alone: Path, name: str, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "on-one"
    more = [*FEW, "train.gradient_accumulation_steps=1", f"output.dir={two}", "distributed.shard_base=auto"]
    if name == "fsdp2":
        more[-1] = "distributed.shard_base=true"
    launched(accelerate_launch(name, "train", str(CONFIG), *more), timeout=900)
    same_steps(two, alone)

    one.mkdir()
    shutil.copytree(two / "checkpoint-2", one / "checkpoint-2")
    shutil.copy(two / "train_log.jsonl", one)
    train(load_config(CONFIG, [*FEW, "train.gradient_accumulation_steps=2", f"output.dir={one}"]), resume=True)
    same_steps(one, alone)

    for folder in (one, alone):
        if not (folder.parent / f"{folder.name}-merged").exists():
            merge(folder, folder.parent / f"{folder.name}-merged", dtype="float32")
    mine, theirs = (sorted((folder.parent / f"{folder.name}-merged").glob("*.safetensors")) for folder in (one, alone))
    assert [file.name for file in mine] == [file.name for file in theirs] != []
    for file, other in zip(mine, theirs, strict=True):
        mine_in, theirs_in = load_file(file), load_file(other)
        assert mine_in.keys() == theirs_in.keys()
        for key, tensor in mine_in.items():
            torch.testing.assert_close(tensor, theirs_in[key], rtol=0, atol=1e-6, msg=key)
