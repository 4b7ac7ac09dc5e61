"""The quickstart shared by two processes, one goes on, merged: the adapter that one process trains alone."""

from __future__ import annotations

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
    *("data.max_length=128", "output.save_steps=2", "output.save_total_limit=null", "output.sample_prompts=[]"),
]
"""Three steps of four rows instead of fifty of sixteen: minutes, not an hour."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "one"
    train(load_config(CONFIG, [*FEW, "train.gradient_accumulation_steps=2", f"output.dir={folder}"]))
    return folder


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor.float(), other[name].float(), rtol=0, atol=atol, msg=name)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero3", marks=WITH_DEEPSPEED)])
def test_two_processes_then_one_then_merged(alone: Path, name: str, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "on-one"
    more = [*FEW, "train.gradient_accumulation_steps=1", f"output.dir={two}", "distributed.shard_base=auto"]
    if name == "fsdp2":
        more[-1] = "distributed.shard_base=true"
    launched(accelerate_launch(name, "train", str(CONFIG), *more), timeout=900)
    same(adapter(two), adapter(alone))

    one.mkdir()
    shutil.copytree(two / "checkpoint-2", one / "checkpoint-2")
    shutil.copy(two / "train_log.jsonl", one)
    train(load_config(CONFIG, [*FEW, "train.gradient_accumulation_steps=2", f"output.dir={one}"]), resume=True)
    same(adapter(one), adapter(alone))

    for folder in (one, alone):
        if not (folder.parent / f"{folder.name}-merged").exists():
            merge(folder, folder.parent / f"{folder.name}-merged", dtype="float32")
    mine, theirs = (sorted((folder.parent / f"{folder.name}-merged").glob("*.safetensors")) for folder in (one, alone))
    assert [file.name for file in mine] == [file.name for file in theirs] != []
    for file, other in zip(mine, theirs, strict=True):
        same(load_file(file), load_file(other))
