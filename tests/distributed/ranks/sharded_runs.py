"""A tiny quantised Llama trained for a few steps with any strategy, for cases of several ranks and for one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugal.adapters import apply_adapters
from frugal.config import LoraSection, TrainSection
from frugal.data import TokenDataset
from frugal.distributed.strategy import Strategy, replicated
from frugal.memory.checkpointing import CheckpointHandle, apply_activation_checkpointing
from frugal.models.attention import use_attention
from frugal.models.head import HeadSpec
from frugal.models.load import load_base
from frugal.models.replacement import replace_modules
from frugal.models.resolve import ResolvedModel
from frugal.objectives import LossModule, make_objective
from frugal.training.loop import train_loop
from frugal.training.oom_fallback import MemorySettings
from frugal.training.optim import build_optimizer, trainable
from frugal.training.schedule import StepOrder, lr_lambda, make_plan
from frugal.training.setup import Hooks, LoopState, TrainSetup
from frugal.training.signals import StopRequest
from tests.support import training as toy

# 22 rows in windows of 8: the last of an epoch is short, and on 4 ranks with one row each some ranks have nothing
TARGETS = [5, 1, 7, 2, 4, 9, 2, 8, 5, 3, 9, 1, 6, 2, 7, 1, 8, 3, 3, 6, 1, 2]
GLOBAL_BATCH = 8


@dataclass
class Setting:
    """One way to train; the same numbers come out for every strategy and world size."""

    policy: str = "recompute"
    train: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    new_token_ids: tuple[int, ...] = ()
    micro: int = 1
    steps: int = 10
    flat: bool = True
    fused: bool = True
    quantize: str = "nf4"
    dtype: torch.dtype = torch.float32
    folder: str = "TINY_UNTIED"
    """Name of the environment variable that names the base's folder."""


def tiny(setting: Setting) -> nn.Module:
    """The adapted base, as a run makes it; B is not zero, so that all gradients are."""
    folder = Path(os.environ[setting.folder])
    loaded = load_base(
        ResolvedModel("tiny", folder, "folder", None),
        quantize=setting.quantize,  # type: ignore[arg-type]
        dtype=setting.dtype,
    )
    if setting.flat:
        assert use_attention(loaded.model).value == "frugal"
    lora = LoraSection.model_validate({"r": 4, "lora_alpha": 8, **setting.lora})
    model = apply_adapters(
        loaded.model, lora, seed=0, quantize=setting.quantize, new_token_ids=setting.new_token_ids
    ).model
    if setting.fused:
        replace_modules(model, compute_dtype=setting.dtype)
    give_b(model)
    return model


def give_b(model: nn.Module) -> None:
    """Seeded numbers in all B matrices."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def rows(targets: Sequence[int] = TARGETS, seed: int = 0) -> TokenDataset:
    return toy.rows(targets, seed=seed, length=12)


def rows_masked_for_some() -> TokenDataset:
    """In the first window the second of two ranks, and the second and fourth of four, have rows without targets."""
    section = TrainSection.model_validate({"group_by_length": False, "per_device_train_batch_size": 1})
    section = section.model_copy(update={"gradient_accumulation_steps": GLOBAL_BATCH})
    plan = make_plan(section, rows=len(TARGETS), world_size=1)
    window = StepOrder(rows().lengths, plan, seed=section.seed, group_by_length=False).rows_of(0)
    return rows([0 if row in window[1::2] else count for row, count in enumerate(TARGETS)])


@dataclass
class Running:
    """A job, its model and what has to be closed."""

    job: TrainSetup
    model: Any
    handle: CheckpointHandle
    records: list[dict[str, Any]] = field(default_factory=list)

    def train(self, state: LoopState | None = None, *, save: Any = None) -> LoopState:
        hooks = Hooks(self.records.append, save or (lambda state: None), StopRequest())
        return train_loop(self.job, hooks, state or LoopState())

    def adapter(self) -> dict[str, Tensor]:
        """Whole, on every rank that writes."""
        return self.job.strategy.full_adapter(self.model)

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records if "loss" in record]


def start(
    setting: Setting,
    strategy: Strategy | None = None,
    *,
    scratch: Path | None = None,
    data: TokenDataset | None = None,
    eval_rows: TokenDataset | None = None,
    model: Any = None,
    head: HeadSpec | None = None,
    **job: Any,
) -> Running:
    """Everything up to the first step. ``model`` and its ``head``: a loaded one instead of the setting's."""
    strategy = strategy or replicated(torch.device("cpu"))
    data = data or rows()
    section = TrainSection.model_validate(
        {
            "group_by_length": False,
            "max_steps": setting.steps,
            "per_device_train_batch_size": setting.micro,
            "gradient_accumulation_steps": GLOBAL_BATCH // setting.micro // strategy.world_size,
            "learning_rate": 3e-3,
            "warmup_ratio": 0.0,
            "weight_decay": 0.01,
            "max_grad_norm": 0.5,
            **setting.train,
        }
    )
    model = tiny(setting) if model is None else model
    module = LossModule(model, make_objective(flat=setting.flat), head=head)
    wrapped, optimizer = strategy.prepare(module, lambda: build_optimizer(trainable(model), section))
    handle = apply_activation_checkpointing(model, setting.policy, scratch_dir=scratch)  # type: ignore[arg-type]
    plan = make_plan(section, rows=len(data), world_size=strategy.world_size)
    torch.manual_seed(5)
    made = TrainSetup(
        module=module,
        wrapped=wrapped,
        strategy=strategy,
        optimizer=optimizer,
        plan=plan,
        order=StepOrder(data.lengths, plan, seed=section.seed, group_by_length=False),
        train=section,
        rows=data,
        eval_rows=eval_rows,
        device=torch.device("cpu"),
        lr_lambda=lr_lambda(section, plan),
        memory=MemorySettings(
            module, section.per_device_train_batch_size, section.per_device_eval_batch_size, handle, scratch
        ),
        **job,
    )
    return Running(made, model, handle)


def largest_difference(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert mine.keys() == other.keys()
    return max(float((mine[name].float() - other[name].float()).abs().max()) for name in mine)
