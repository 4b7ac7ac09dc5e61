"""Run by test_two_ranks.py as one of two gloo processes. Writes what it saw to `<folder>/<rank>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from frugal.distributed import group as ranks
from frugal.errors import CheckpointError, FrugalError
from frugal.training.evaluate import evaluate_rows
from frugal.training.loop import train_loop
from frugal.training.optim import trainable
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from tests.support import training as toy

TARGETS = [1, 9, 2, 4, 3]
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "warmup_ratio": 0.0,
    "eval_steps": 2,
}


def message(action: Any) -> str:
    try:
        action()
    except FrugalError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail() -> None:
    raise CheckpointError("disk full")


def compared(parameters: dict[str, Any]) -> str:
    return message(lambda: ranks.compare({name: ranks.digest(each) for name, each in parameters.items()}, "here"))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = toy.tiny_model()
    job = toy.make_job(
        model, toy.rows(TARGETS), eval_rows=toy.rows([2, 1, 5], seed=3), per_device_train_batch_size=1, **SETTINGS
    )
    me = ranks.rank()
    out: dict[str, Any] = {"world": ranks.world_size(), "backend": torch.distributed.get_backend()}
    parameters = trainable(model)
    out["same"] = compared(parameters)
    out["on_first"] = message(lambda: ranks.on_first(fail))
    out["value"] = ranks.on_first(lambda: 41 + me)
    out["stop"] = ranks.any_rank(143 if me == 1 else None)
    records: list[dict[str, Any]] = []
    train_loop(job, Hooks(records.append, lambda state: None, StopRequest()), LoopState())
    out["records"] = records
    out["after"] = compared(parameters)
    alone = evaluate_rows(
        job.module, job.eval_rows, job.objective, batch_size=1, device=torch.device("cpu"), rank=me, world_size=2
    )
    out["eval"] = alone.loss
    save_file({name: parameter.detach() for name, parameter in parameters.items()}, folder / f"{me}.safetensors")
    if me == 1:
        name = sorted(parameters)[3]
        with torch.no_grad():
            parameters[name][0, 0] += 1e-6
        out["changed"] = name
    out["other"] = compared(parameters)
    (folder / f"{me}.json").write_text(json.dumps(out))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
