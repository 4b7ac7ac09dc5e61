"""Twenty steps of preference training are those of TRL's trainers on a stock model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from tests.conftest import make_llama
from tests.support.preference import JUDGED, PAIRS, job, pairs, steps
from tests.support.rows import byte_tokenizer


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
def test_twenty_steps_are_those_of_trl(tmp_path: Path, loss_type: str) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    train: dict[str, Any] = {"max_steps": 20, "learning_rate": 1e-3}
    args = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), loss_type=[loss_type], beta=0.2, per_device_train_batch_size=4, **train,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, gradient_checkpointing=False, bf16=False,
        use_cpu=True, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, max_length=None,
    )  # fmt: skip
    tokenizer = byte_tokenizer(template=None, eos="<|endoftext|>", pad="<|endoftext|>")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl.DPOTrainer(  # given a base: of a PEFT model it takes the adapter as it is for the reference
        model=make_llama(), args=args, processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(PAIRS),
        peft_config=lora,
    )  # fmt: skip
    start = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(trainer.model).items()}
    trainer.train()
    model = get_peft_model(make_llama(use_cache=False), lora)
    set_peft_model_state_dict(model, start)
    ours = steps(
        job(model, pairs(tmp_path), {"name": "dpo", "loss_type": loss_type, "beta": 0.2}, **train,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, lr_scheduler_type="constant")
    )  # fmt: skip
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(ours) == len(theirs) == 20
    for one, other in zip(ours, theirs, strict=True):
        for key in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), (one["step"], key)
    assert ours[-1]["rewards/margins"] > ours[0]["rewards/margins"]
    assert math.isfinite(ours[-1]["loss"])


def test_twenty_steps_of_kto_are_those_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    train: dict[str, Any] = {"max_steps": 20, "learning_rate": 1e-3}
    weights = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}
    args = trl.KTOConfig(
        output_dir=str(tmp_path / "trl"), loss_type="kto", per_device_train_batch_size=4, **weights, **train,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, gradient_checkpointing=False, bf16=False,
        use_cpu=True, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, max_length=None,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    tokenizer = byte_tokenizer(template=None, eos="<|endoftext|>", pad="<|endoftext|>")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl.KTOTrainer(
        model=make_llama(), args=args, processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(JUDGED),
        peft_config=lora,
    )  # fmt: skip
    start = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(trainer.model).items()}
    trainer.train()
    model = get_peft_model(make_llama(use_cache=False), lora)
    set_peft_model_state_dict(model, start)
    ours = steps(
        job(model, pairs(tmp_path, objective="kto"), {"name": "kto", **weights}, **train,
            per_device_train_batch_size=1, gradient_accumulation_steps=4, lr_scheduler_type="constant")
    )  # fmt: skip
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(ours) == len(theirs) == 20
    for one, other in zip(ours, theirs, strict=True):
        for key in ("loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), (one["step"], key)
    assert ours[-1]["rewards/margins"] > 0
