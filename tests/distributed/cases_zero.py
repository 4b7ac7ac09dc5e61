"""Cases of test_zero.py. Each trains the same 10 steps of a tiny Llama as one process does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import toy
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from worker import Rank

from frugal.adapters import adapter_state, apply_adapters
from frugal.config import LoraSection, TrainSection
from frugal.data import TokenDataset
from frugal.memory.checkpoint import apply_activation_checkpointing
from frugal.models.attention import use_attention
from frugal.models.load import load_base
from frugal.models.source import resolve_base
from frugal.models.swap import swap_modules
from frugal.shard import zero_state
from frugal.shard.state import OptimizerState
from frugal.shard.strategy import OneProcess, Strategy
from frugal.shard.zero import Zero
from frugal.shard.zero_config import ZeroSettings
from frugal.train.job import Hooks, Job, LoopState
from frugal.train.loop import train_loop
from frugal.train.loss import LossModule
from frugal.train.optim import build_optimizer, trainable
from frugal.train.schedule import StepOrder, make_plan, rate_factor

STEPS = 10
TARGETS = [5, 3, 7, 1, 4, 6, 2, 8, 5, 3, 9, 4, 6, 2, 7, 1, 8]  # 17 rows: windows of 4, the last one short
SECTION: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "group_by_length": False,
    "warmup_ratio": 0.0,
    "loraplus_lr_ratio": 2.0,
}


def tiny(quantize: str = "nf4", *, fused: bool = True, folder: Path | None = None, **lora: Any) -> PeftModel:
    """The adapted tiny Llama of a folder, loaded as a run loads it; B is not zero, so that all gradients are."""
    base = resolve_base(str(folder or os.environ["TINY_LLAMA"]), None)
    loaded = load_base(base, quantize=quantize, double_quant=True, dtype=torch.float32, device="cpu")  # type: ignore[arg-type]
    use_attention(loaded.model, "auto")
    section = LoraSection.model_validate({"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **lora})
    model = apply_adapters(loaded.model, section, seed=0, quantize=quantize).model  # type: ignore[arg-type]
    if fused:
        swap_modules(model, compute_dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def rows() -> TokenDataset:
    return toy.rows(TARGETS, length=10)


def job_of(model: PeftModel, strategy: Strategy, *, world: int = 2, **changes: Any) -> Job:
    """A job of one or two ranks over the same windows of 4 rows."""
    section = TrainSection.model_validate({**SECTION, "gradient_accumulation_steps": 4 // world, **changes})
    data, module = rows(), LossModule(model)
    wrapped, optimizer = strategy.prepare(module, lambda: build_optimizer(trainable(model), section))
    plan = make_plan(section, rows=len(data), world_size=world)
    return Job(
        module=module, wrapped=wrapped, strategy=strategy, optimizer=optimizer, plan=plan,
        order=StepOrder(data.lengths, plan, seed=section.seed, group_by_length=False), train=section, rows=data,
        eval_rows=None, pad_id=0, flat=True, accelerator=Accelerator(cpu=True, mixed_precision="no"),
        rate_factor=rate_factor(section, plan), save_steps=None,
    )  # fmt: skip


class NoStop:
    exit_code = None


def run(job: Job, *, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
    """Train steps ``first`` to ``last``; their records."""
    records: list[dict[str, Any]] = []
    if last is not None:
        job.plan = type(job.plan)(**{**vars(job.plan), "total_steps": last})
    train_loop(job, Hooks(records.append, lambda state: None, NoStop()), LoopState(step=first))  # type: ignore[arg-type]
    return [{key: record[key] for key in ("loss", "grad_norm", "learning_rate", "rows_sha256")} for record in records]


def settings(stage: int, *, world: int = 2, **changes: Any) -> ZeroSettings:
    found = ZeroSettings(
        stage=stage,
        micro_batch=SECTION["per_device_train_batch_size"],
        accumulation=4 // world,
        max_grad_norm=SECTION["max_grad_norm"],
    )
    return ZeroSettings(**{**vars(found), **changes})


def one_process(folder: Path, model: PeftModel, **changes: Any) -> list[dict[str, Any]]:
    """The reference: losses; adapter and optimizer state as files in ``folder``."""
    strategy = OneProcess(torch.device("cpu"))
    strategy.world_size, strategy.rank = 1, 0
    job = job_of(model, strategy, world=1, **changes)
    records = run(job)
    save(folder, strategy.full_adapter(model), strategy.full_optimizer_state(job.optimizer))
    return records


def save(folder: Path, adapter: Mapping[str, Tensor], state: OptimizerState) -> None:
    save_file({key: tensor.contiguous() for key, tensor in adapter.items()}, folder / "adapter.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in state.tensors.items()}, folder / "optimizer.safetensors")


def zero_run(rank: Rank, stage: int, *, checkpointing: str = "none", quantize: str = "nf4", lora: Any = None, **changes: Any) -> Any:
    model = tiny(quantize, **(lora or {}))
    whole_bytes = zero_state.local_bytes(model)
    apply_activation_checkpointing(model, checkpointing)  # type: ignore[arg-type]
    strategy = Zero(torch.device("cpu"), settings(stage, **changes))
    job = job_of(model, strategy)
    stored = zero_state.local_bytes(model)
    records = run(job)
    adapter, state = strategy.full_adapter(model), strategy.full_optimizer_state(job.optimizer)
    if rank.rank == 0:
        save(rank.folder, adapter, state)
    digests = strategy.digests(trainable(model))
    strategy.close()
    return {"records": records, "whole": whole_bytes, "stored": stored, "digests": digests, "meta": state.meta}


def case_zero1(rank: Rank) -> Any:
    return zero_run(rank, 1)


def case_zero2(rank: Rank) -> Any:
    return zero_run(rank, 2)


def case_zero3(rank: Rank) -> Any:
    return zero_run(rank, 3)
