"""Whole runs on a tiny model, for tests: data, configuration, and what two runs must have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from frugal.training.log import read_log

EXACT = ("step", "loss", "learning_rate", "grad_norm", "tokens", "trained_tokens", "rows_sha256", "eval_loss")


def write_rows(path: Path, count: int = 20, seed: int = 0) -> Path:
    """Conversations of different lengths."""
    rows = []
    for index in range(count):
        answer = f"The answer is {index + seed}. " + "good morning " * ((index * 7 + seed) % 5)
        rows.append(
            {"messages": [{"role": "user", "content": f"hello {index}"}, {"role": "assistant", "content": answer}]}
        )
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def config(base: Path, rows: Path, run_dir: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """20 rows, 3 epochs, batch 2 = 30 steps with dropout; ``sections`` are merged in."""
    plain: dict[str, Any] = {
        "model": {"base": str(base), "quantize": "none"},
        "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
        "data": {"train": str(rows), "max_length": 128, "cache": False},
        "train": {
            "num_train_epochs": 3,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
        },
        "output": {"dir": str(run_dir)},
    }
    for name, section in sections.items():
        plain[name] = {**plain[name], **section} if name in plain else section
    return plain


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The log's records, only what must be equal between two runs."""
    log = read_log(run_dir / "train_log.jsonl")
    return [{key: record[key] for key in EXACT if key in record} for record in log]


def same_result(run_dir: Path, other: Path) -> None:
    """Row order, losses, rates, gradient norms and final weights are equal bit for bit."""
    assert records(run_dir) == records(other)
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (run_dir, other))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def start_cli(*arguments: str) -> subprocess.Popen[str]:
    """`frugal ...` as a process of its own, with one thread as in the tests."""
    return subprocess.Popen(
        [sys.executable, "-m", "frugal", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
