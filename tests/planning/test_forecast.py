"""The plan against real steps on the CPU: forecast and measured peak of every phase, over families and settings."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from frugal.adapters import apply_adapters
from frugal.config import LoraSection, MemorySection, ModelSection, TrainSection
from frugal.data import TokenDataset
from frugal.device import Device
from frugal.distributed.strategy import replicated
from frugal.memory import apply_activation_checkpointing
from frugal.memory.meter import LiveBytesMeter
from frugal.models.attention import use_attention
from frugal.models.load import load_base
from frugal.models.replacement import replace_modules
from frugal.models.resolve import ResolvedModel
from frugal.objectives import LossModule, make_objective
from frugal.planning.simulate import PHASES, MemorySimulator, Phase, Shape
from frugal.training import loop
from frugal.training.evaluate import evaluate_rows
from frugal.training.oom_fallback import MemorySettings
from frugal.training.optim import build_optimizer, trainable
from frugal.training.schedule import StepOrder, lr_lambda, make_plan
from frugal.training.setup import LoopState, TrainSetup

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Setting:
    """One run to forecast and to measure."""

    family: str = "llama"
    quantize: str = "nf4"
    policy: Any = "recompute"
    rows: int = 2
    length: int = 96
    documents: int = 1
    accumulate: int = 1
    optim: Any = "adamw"
    fused: bool = True
    dtype: str = "float32"
    lora: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [self.family, self.quantize, self.policy, f"{self.rows}x{self.length}", f"{self.documents}docs",
                f"acc{self.accumulate}", self.optim, "fused" if self.fused else "stock", self.dtype,
                *map(str, self.lora.values()), *map(str, self.changes.values())]  # fmt: skip
        return "-".join(said)


GEMMA = {"sliding_window": 32}
SETTINGS = [
    Setting(changes={"num_hidden_layers": 6}),
    Setting(policy="none"),
    Setting(policy="offload", changes={"num_hidden_layers": 5}),
    Setting(policy="disk"),
    Setting(quantize="none"),
    Setting(quantize="none", policy="none", optim="adamw_8bit"),
    Setting(optim="adamw_8bit", accumulate=3),
    Setting(accumulate=2, policy="none"),
    Setting(rows=1, length=256),
    Setting(rows=1, length=240, documents=5),
    Setting(rows=2, length=120, documents=3, policy="none"),
    Setting(rows=4, length=64, fused=False),
    Setting(policy="none", fused=False, quantize="none"),
    Setting(dtype="bfloat16"),
    Setting(dtype="bfloat16", quantize="none", policy="none"),
    Setting(lora={"lora_dropout": 0.1}),
    Setting(lora={"target_modules": ["q_proj", "v_proj"]}, policy="none"),
    Setting(lora={"modules_to_save": ["lm_head"]}, changes={"tie_word_embeddings": False}),
    Setting(family="qwen3"),
    Setting(family="qwen3", policy="offload", optim="adamw_8bit"),
    Setting(family="qwen2", policy="none", changes={"num_hidden_layers": 5}),
    Setting(family="mistral", changes={"sliding_window": 32}),
    Setting(family="gemma2", changes=GEMMA, length=64),
    Setting(family="gemma3_text", changes={**GEMMA, "num_hidden_layers": 7}, policy="recompute"),
    Setting(family="phi3", changes={"sliding_window": None}),
    Setting(family="llama", changes={"vocab_size": 20_000, "tie_word_embeddings": True}, rows=1),
]


def folder_of(setting: Setting, root: Path) -> Path:
    """A saved model with random weights."""
    values = {**SIZES, **setting.changes}
    folder = root / f"{setting.family}-{setting.dtype}-{abs(hash(str(sorted(values.items(), key=str))))}"
    if not folder.exists():
        config = AutoConfig.for_model(setting.family, **values)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(getattr(torch, setting.dtype)).save_pretrained(folder)
    return folder


def dataset(setting: Setting, rows: int) -> TokenDataset:
    """Rows of equal length, every token trained that can be."""
    size = setting.length // setting.documents
    documents = rows * setting.documents
    ids = [np.full(size, 5 + i % 7, np.int32) for i in range(documents)]
    data = TokenDataset.from_documents(ids, [np.ones(size, bool)] * documents, list(range(documents)))
    groups = [range(i * setting.documents, (i + 1) * setting.documents) for i in range(rows)]
    return data.grouped(groups)


def train_section(setting: Setting) -> TrainSection:
    return TrainSection(
        per_device_train_batch_size=setting.rows,
        per_device_eval_batch_size=setting.rows,
        gradient_accumulation_steps=setting.accumulate,
        optim=setting.optim,
        group_by_length=False,
    )


def measured(setting: Setting, folder: Path, scratch: Path) -> dict[Phase, int]:
    """Peaks of real steps, taken with the training loop's own step and evaluation."""
    torch.manual_seed(0)
    train = train_section(setting)
    loaded = load_base(ResolvedModel("x", folder, "folder", None), quantize=setting.quantize)  # type: ignore[arg-type]
    flat = use_attention(loaded.model).value == "frugal" or setting.documents > 1
    quantize = setting.quantize
    model = apply_adapters(loaded.model, LoraSection(r=4, **setting.lora), seed=0, quantize=quantize).model
    if setting.fused:
        replace_modules(model, compute_dtype=torch.float32)
    module = LossModule(model, make_objective(flat=flat))
    handle = apply_activation_checkpointing(model, setting.policy, scratch_dir=scratch)
    data = dataset(setting, setting.rows * setting.accumulate)
    plan = make_plan(train, rows=len(data), world_size=1)
    strategy = replicated(torch.device("cpu"))
    wrapped, optimizer = strategy.prepare(module, lambda: build_optimizer(trainable(model), train))
    job = TrainSetup(
        module=module,
        wrapped=wrapped,
        strategy=strategy,
        optimizer=optimizer,
        plan=plan,
        order=StepOrder(data.lengths, plan, seed=0, group_by_length=False),
        train=train,
        rows=data,
        eval_rows=None,
        device=torch.device("cpu"),
        lr_lambda=lr_lambda(train, plan),
        memory=MemorySettings(module, setting.rows, setting.rows),
    )
    peaks: dict[Phase, int] = {}
    step = job.optimizer_step(loss_scaling=False)
    module.train()
    try:
        for phase in PHASES:
            with LiveBytesMeter(module, job.optimizer) as meter:
                if phase == "evaluation":
                    evaluate_rows(module, data, module.objective, batch_size=setting.rows, device=torch.device("cpu"))
                else:
                    loop.one_step(job, step, LoopState())
            peaks[phase] = meter.peak_bytes
    finally:
        handle.close()
    return peaks


def simulation(setting: Setting, folder: Path, scratch: Path, *, whole: bool = False) -> MemorySimulator:
    return MemorySimulator(
        AutoConfig.from_pretrained(folder),
        ModelSection(base="x", quantize=setting.quantize),  # type: ignore[arg-type]
        LoraSection(r=4, **setting.lora),
        train_section(setting),
        MemorySection(fused=setting.fused),
        torch.float32,
        Device("cpu"),
        policy=setting.policy,
        whole=whole,
        scratch_dir=str(scratch),
        packed=setting.documents > 1,
        documents=setting.documents,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


_ERRORS: dict[str, float] = {}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_forecast_and_measured_peak(setting: Setting, root: Path) -> None:
    folder = folder_of(setting, root)
    sim = simulation(setting, folder, root / "scratch")
    forecast = {phase: sim.peak(phase, Shape(setting.rows, setting.length)).bytes for phase in PHASES}
    real = measured(setting, folder, root / "scratch")
    for phase in PHASES:
        error = forecast[phase] / real[phase] - 1
        _ERRORS[f"{setting} {phase}"] = error
        assert abs(error) <= 0.05, f"{phase}: forecast {forecast[phase]:,}, measured {real[phase]:,} ({error:+.2%})"


def test_the_median_is_within_one_percent() -> None:
    if len(_ERRORS) < 3 * 20:
        pytest.skip("needs the settings above in the same process")
    assert statistics.median(abs(error) for error in _ERRORS.values()) <= 0.01
