"""Whole runs that are resumed elsewhere: what one process and several ranks train alike."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.support import runs

GLOBAL_BATCH = 4
STEPS = 10  # two epochs: a checkpoint at step 3 is in the middle of the first


def config(run_dir: Path, world: int, strategy: str = "auto", **sections: dict[str, Any]) -> dict[str, Any]:
    """The run's configuration for ``world`` processes; only what may differ differs."""
    return runs.config(
        Path(os.environ["TINY"]),
        Path(os.environ["ROWS"]),
        run_dir,
        model={"quantize": "nf4"},
        lora={"lora_dropout": 0.0, **sections.get("lora", {})},
        data={"eval_split": 3},
        train={
            "num_train_epochs": 1.0,
            "max_steps": STEPS,
            "gradient_accumulation_steps": GLOBAL_BATCH // world,
            "learning_rate": 3e-3,
            "eval_steps": 3,
            **sections.get("train", {}),
        },
        memory={"checkpoint": "recompute"},
        distributed={"strategy": strategy, **sections.get("distributed", {})},
        output={
            "dir": str(run_dir),
            "save_steps": 3,
            "save_total_limit": None,
            "keep_best": True,
            "sample_prompts": ["hello 3"],
            "sample_max_new_tokens": 5,
        },
    )


def go_on_from(run_dir: Path, step: int, new: Path) -> Path:
    """A folder that holds only one checkpoint of another run, as after a crash. One process calls it."""
    new.mkdir(parents=True)
    shutil.copytree(run_dir / f"checkpoint-{step}", new / f"checkpoint-{step}")
    return new
