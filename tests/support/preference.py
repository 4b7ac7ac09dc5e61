"""Small pieces that tests of preference training share: pairs, a tiny LoRA model, a job of an objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from frugal.config import ObjectiveSection
from frugal.data import TokenDataset, build
from frugal.objectives import configured_objective
from frugal.training.loop import train_loop
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from tests.conftest import make_llama
from tests.support import training as toy
from tests.support.rows import byte_tokenizer, section, write_rows

PAIRS = [
    {"prompt": "one and one is", "chosen": " two, as ever", "rejected": " three"},
    {"prompt": "the sky", "chosen": " is blue", "rejected": " is made of green cheese"},
    {"prompt": "a", "chosen": " b", "rejected": " z z z z z z"},
    {"prompt": "say yes or no, and nothing else:", "chosen": " yes", "rejected": " perhaps"},
]


JUDGED = [
    {"prompt": "one and one is", "completion": " two, as ever", "label": True},
    {"prompt": "the sky", "completion": " is made of green cheese", "label": False},
    {"prompt": "a", "completion": " b", "label": True},
    {"prompt": "say yes or no, and nothing else:", "completion": " perhaps", "label": False},
]


def pairs(tmp_path: Path, rows: list[dict[str, Any]] | None = None, objective: str = "dpo") -> TokenDataset:
    path = write_rows(tmp_path / "pairs.jsonl", rows or (JUDGED if objective == "kto" else PAIRS))
    tokenizer = byte_tokenizer(template=None, eos="<|endoftext|>")
    return build(section(path), tokenizer, seed=0, vocab_size=300, objective=objective).train


def lora_llama(**changes: Any) -> Any:
    torch.manual_seed(3)
    base = make_llama(**changes)
    base.config.use_cache = False
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(base, config)


def job(model: Any, data: TokenDataset, objective: dict[str, Any], *, flat: bool = False, **train: Any) -> Any:
    """A job of `tests.support.training` with another objective."""
    made = toy.make_job(model, data, flat=flat, **train)
    made.module.objective = configured_objective(ObjectiveSection.model_validate(objective), flat=flat)
    return made


def steps(made: Any) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    train_loop(made, Hooks(records.append, lambda state: None, StopRequest()), LoopState())
    return [record for record in records if "loss" in record]
