"""What the benchmarks share: the two sides of a comparison, a QLoRA step, and facts about the machine."""

from __future__ import annotations

import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from frugal.assets import fetch
from frugal.config import LoraSection
from frugal.memory import apply_activation_checkpointing
from frugal.memory.checkpointing import CheckpointHandle, Policy
from frugal.memory.meter import LiveBytesMeter
from frugal.memory.meter_report import MeterReport
from frugal.models.build import ModelSpec, build
from frugal.models.resolve import resolve_base
from frugal.objectives import LossModule

MODEL = "smollm2-135m-instruct"
RANK = 16
ALPHA = 32
RATE = 2e-4


@dataclass
class Side:
    """One side of a comparison: a model ready to train, and how its loss is computed."""

    name: str
    model: nn.Module
    loss: Callable[[dict[str, Tensor]], Tensor]
    optimizer: torch.optim.Optimizer
    checkpoints: CheckpointHandle | None = None

    def step(self, batch: dict[str, Tensor]) -> float:
        """Forward, backward, AdamW. Returns the loss."""
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def meter(self, batch: dict[str, Tensor]) -> MeterReport:
        """The live bytes of one step, with optimizer state as it is after the first one."""
        if not self.optimizer.state:
            self.step(batch)
        with LiveBytesMeter(self.model, self.optimizer) as meter:
            self.step(batch)
        return meter.report()

    def seconds(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        """Wall time and CPU time (all threads; what another process takes does not count) of one step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step(batch)
        return time.perf_counter() - wall, time.process_time() - cpu

    def checkpoint(self, policy: Policy, scratch_dir: Path | None = None) -> None:
        """Switch frugal's activation checkpointing."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.checkpoints = apply_activation_checkpointing(self.model, policy, scratch_dir=scratch_dir)


def trl_side() -> Side:
    """TRL's SFTTrainer over the model of `peer_side`: its own loss, which builds no logits."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    folder = tempfile.mkdtemp(prefix="frugal-trl-")  # it writes nothing there before it saves
    arguments = SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    trainer = SFTTrainer(
        model=_quantised_peft(),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]}),
        processing_class=AutoTokenizer.from_pretrained(fetch(MODEL)),
    )
    model = trainer.model.train()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = trainer.compute_loss(model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])})
        return result

    return Side("trl", model, loss, adamw(model))


def peer_side() -> Side:
    """PEFT + bitsandbytes + transformers, labels given to the model."""
    model = _quantised_peft()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = model(**batch).loss
        return result

    return Side("peer", model, loss, adamw(model))


def quantised_base() -> nn.Module:
    """bitsandbytes + transformers as a good user sets them up for float32 compute on a CPU, before the adapter.

    NF4 with double quantisation, sdpa attention, non-reentrant checkpointing. The model is loaded as float32
    because 16-bit products are many times slower on a CPU; `prepare_model_for_kbit_training` then finds nothing left to
    cast up.
    """
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        fetch(MODEL), quantization_config=quantization, dtype=torch.float32, attn_implementation="sdpa"
    )
    prepared: nn.Module = prepare_model_for_kbit_training(
        base, use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    return prepared


def lora_config() -> LoraConfig:
    """The adapter of every side."""
    return LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def _quantised_peft() -> nn.Module:
    """`quantised_base` with PEFT's adapter."""
    base = quantised_base()
    torch.manual_seed(0)
    model = get_peft_model(base, lora_config()).train()
    model.config.use_cache = False
    return model


def frugal_side(policy: Policy = "recompute", *, fused: bool = True) -> Side:
    """frugal's own load, adapters, replaced modules, checkpointing and loss."""
    spec = ModelSpec(source=resolve_base(MODEL), lora=LoraSection(r=RANK, lora_alpha=ALPHA), fused=fused)
    built = build(spec)
    model = built.model.train()
    module = LossModule(model, head=built.head).train()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        total, sums = module(batch)
        return total / sums[1]

    side = Side("frugal", model, loss, adamw(model))
    side.checkpoint(policy)
    return side


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained, as both sides use it."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)


def random_batch(batch: int, tokens: int, vocab_size: int = 49152, seed: int = 0) -> dict[str, Tensor]:
    """Random token ids [batch, tokens], every one of them trained on."""
    ids = torch.randint(5, vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def interleaved(sides: list[Side], batch: dict[str, Tensor], repeats: int) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds of a step of each side, taken in turns so that a slow minute hits all alike."""
    times: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for _ in range(repeats):
        for side in sides:
            times[side.name].append(side.seconds(batch))
    return {
        name: {
            "seconds": statistics.median(wall for wall, _ in values),
            "cpu_seconds": statistics.median(cpu for _, cpu in values),
        }
        for name, values in times.items()
    }


def environment() -> dict[str, Any]:
    """Machine, versions and commit, for result files."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "processor": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl", "bitsandbytes")},
        "commit": head.stdout.strip() or None,
    }
