"""R04: resume loads the trained adapter into the one that is there: bit-equal, one only, never a fresh one over it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import frugal.checkpoints.read
from frugal.adapters import adapter_state, apply_adapters, load_adapter
from frugal.checkpoints.read import put_adapter
from frugal.config import LoraSection
from frugal.distributed.strategy import OneProcess, Strategy
from frugal.errors import CheckpointError, ConfigError
from frugal.models.load import load_base
from frugal.models.resolve import resolve_base
from frugal.run.train import train
from tests.support import runs


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> tuple[Path, dict[str, Any]]:
    """A run of 6 steps with a checkpoint at each."""
    root = tmp_path_factory.mktemp("R04")
    sections: dict[str, Any] = {"train": {"max_steps": 6}}
    config = runs.config(tiny_llama_folder, runs.write_rows(root / "rows.jsonl"), root / "run", **sections)
    config["output"].update(save_steps=1, save_total_limit=None)
    train(config)
    return root, config


ONE = OneProcess(torch.device("cpu"))


def fresh(base: Path) -> Any:
    model = load_base(resolve_base(str(base)), quantize="none").model
    return apply_adapters(model, LoraSection(r=4, lora_alpha=8), seed=42).model


def test_resume_keeps_tensors_loss_and_count(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, config = done
    shutil.copytree(root / "run" / "checkpoint-5", tmp_path / "checkpoint-5")
    seen: dict[str, Any] = {}

    def spy(strategy: Strategy, model: Any, folder: Path) -> None:
        put_adapter(strategy, model, folder)
        saved = load_file(folder / "adapter_model.safetensors")
        seen["equal"] = all(torch.equal(tensor, saved[name]) for name, tensor in adapter_state(model).items())
        seen["adapters"] = list(model.peft_config)
        seen["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        seen["in file"] = sum(tensor.numel() for tensor in saved.values())

    monkeypatch.setattr(frugal.checkpoints.read, "put_adapter", spy)
    train({**config, "output": {**config["output"], "dir": str(tmp_path)}}, resume=True)
    assert seen["equal"]
    assert seen["adapters"] == ["default"]
    assert seen["trainable"] == seen["in file"]
    assert runs.records(tmp_path)[-1] == runs.records(root / "run")[-1]  # step 6 has its loss, not the first one's
    runs_first = runs.records(root / "run")[0]
    assert runs.records(tmp_path)[-1]["loss"] < runs_first["loss"] - 0.5


def test_a_second_adapter_is_refused_and_nothing_changes(tiny_llama_folder: Path) -> None:
    model = fresh(tiny_llama_folder)
    before = {name: tensor.clone() for name, tensor in adapter_state(model).items()}
    names = {name for name, _ in model.named_parameters()}
    for target in (model, model.get_base_model()):
        with pytest.raises(ConfigError, match="carries an adapter already"):
            apply_adapters(target, LoraSection(r=4), seed=1)
    assert {name for name, _ in model.named_parameters()} == names
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter_state(model).items())


def test_three_checkpoints_one_after_another(done: tuple[Path, dict[str, Any]], tiny_llama_folder: Path) -> None:
    root, _ = done
    model = fresh(tiny_llama_folder)
    count = sum(1 for _ in model.parameters())
    for step in (2, 6, 4):
        put_adapter(ONE, model, root / "run" / f"checkpoint-{step}")
        saved = load_file(root / "run" / f"checkpoint-{step}" / "adapter_model.safetensors")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in adapter_state(model).items())
    assert sum(1 for _ in model.parameters()) == count
    assert list(model.peft_config) == ["default"]


def test_an_adapter_that_does_not_fit_is_refused_by_name(
    done: tuple[Path, dict[str, Any]], tiny_llama_folder: Path, tmp_path: Path
) -> None:
    root, _ = done
    tensors = load_file(root / "run" / "checkpoint-6" / "adapter_model.safetensors")
    name = sorted(tensors)[0]
    model = fresh(tiny_llama_folder)
    for change in ({name: torch.zeros(1, 1)}, {"unknown.lora_A.weight": torch.zeros(2, 2)}):
        save_file({**tensors, **change}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=next(iter(change)).replace(".", r"\.")):
            put_adapter(ONE, model, tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="1 tensors differ"):
        put_adapter(ONE, model, tmp_path)


def test_the_finished_adapter_is_the_last_checkpoints(
    done: tuple[Path, dict[str, Any]], tiny_llama_folder: Path
) -> None:
    root, _ = done
    last, final = (
        load_file(folder / "adapter_model.safetensors") for folder in (root / "run/checkpoint-6", root / "run")
    )
    assert all(torch.equal(last[name], final[name]) for name in last)
    model = load_adapter(load_base(resolve_base(str(tiny_llama_folder)), quantize="none").model, root / "run")
    assert all(torch.equal(tensor, final[name]) for name, tensor in adapter_state(model).items())
