"""Whole runs that launchers start: configurations, commands, and what one process trains."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from frugal.run.train import train
from tests.distributed.ranks.harness import ROOT, free_port, group_environment
from tests.support import runs

WITH_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
ENVIRONMENT = {key: value for key, value in group_environment(2).items() if not key.endswith("_SIZE")}
del ENVIRONMENT["MASTER_ADDR"], ENVIRONMENT["MASTER_PORT"], ENVIRONMENT["ACCELERATE_USE_CPU"]


def accelerate_launch(name: str, *arguments: str, world: int = 2) -> list[str]:
    """As in the documentation; the port is one that no other test uses."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(world)),
        *("--config_file", str(ROOT / "configs" / "accelerate" / f"{name}.yaml"), "--main_process_port"),
        *(str(free_port()), "-m", "frugal", *arguments),
    ]


def torchrun(*arguments: str, world: int = 2) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world), "--master_port"),
        *(str(free_port()), "-m", "frugal", *arguments),
    ]


def launched(command: list[str], timeout: float = 300) -> str:
    """Run a launcher to its end; what it and its ranks wrote."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


class Runs:
    """Configurations of the same run under other folders, and that run by one process."""

    def __init__(self, root: Path, base: Path) -> None:
        self.root, self.base = root, base
        self.rows = runs.write_rows(root / "rows.jsonl", 22)
        self.one = root / "one"
        train(self.config("one"))

    def config(self, name: str, world: int = 1, /, **train_section: Any) -> dict[str, Any]:
        """Global batch 4, 6 steps, of which the last is short; quantised."""
        return runs.config(
            self.base,
            self.rows,
            self.root / name,
            model={"quantize": "nf4"},
            lora={"lora_dropout": 0.0},
            train={
                "num_train_epochs": 1,
                "gradient_accumulation_steps": 4 // world,
                "learning_rate": 3e-3,
                **train_section,
            },
            output={"save_steps": 3, "save_total_limit": None},
        )

    def file(self, name: str, world: int = 2, /, **train_section: Any) -> Path:
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self.config(name, world, **train_section)), encoding="utf-8")
        return path


def same(folder: Path, other: Path) -> None:
    """Row order, losses and final adapter."""
    mine, theirs = runs.records(folder), runs.records(other)
    assert [record["rows_sha256"] for record in mine] == [record["rows_sha256"] for record in theirs]
    assert [record["loss"] for record in mine] == pytest.approx([record["loss"] for record in theirs], abs=1e-5)
    a, b = (load_file(each / "adapter_model.safetensors") for each in (folder, other))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=1e-5, msg=name)
