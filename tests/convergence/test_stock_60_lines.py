"""The loss curve of a run equals that of the same training written in 60 lines with stock transformers and PEFT.

Same base, conversations and order of rows, fp32, no dropout: 20 steps, each within 1e-4 relative. Everything else
is done twice and apart: rendering and masking, adapters, loss, accumulation, clipping, optimizer and schedule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, get_cosine_schedule_with_warmup

from frugal.run.train import train
from frugal.training.log import read_log
from frugal.training.schedule import step_batches
from tests.support import runs

STEPS, RATE = 20, 1e-3


# ----- the stock training: 60 lines from here -----
def stock_losses(base: Path, data: Path, order: list[list[int]], quantize: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of every step."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if quantize == "nf4":
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(base, **settings)
    model.requires_grad_(False)
    torch.manual_seed(42)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    losses, norms = [], []
    for batch in order:
        examples = [encode(tokenizer, rows[index]) for index in batch]
        targets = sum(sum(label != -100 for label in labels[1:]) for _, labels in examples)
        total = 0.0
        for ids, labels in examples:  # one row at a time, all divided by the targets of the whole batch
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            loss = F.cross_entropy(logits[0, :-1].float(), torch.tensor(labels[1:]), reduction="sum") / targets
            loss.backward()
            total += loss.item()
        norms.append(clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids, and labels on the answer and its end of turn."""
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    text = prompt + messages[1]["content"] + "<|im_end|>\n"
    assert text.endswith(tokenizer.apply_chat_template(messages, tokenize=False)[-len(messages[1]["content"]) - 12 :])
    answer = tokenizer(messages[1]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tail = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return head + answer + tail, [-100] * len(head) + answer + [-100] * len(tail)


# ----- to here -----


def compare(base: Path, tmp_path: Path, quantize: str, batch: int) -> None:
    data = runs.write_rows(tmp_path / "rows.jsonl", 24)
    config = runs.config(
        base,
        data,
        tmp_path / "run",
        model={"base": str(base), "quantize": quantize, "dtype": "float32"},
        lora={"lora_dropout": 0.0},
    )
    config["train"] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": batch // 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "warmup_steps": 2,
        "group_by_length": False,
    }
    train(config)
    log = read_log(tmp_path / "run" / "train_log.jsonl")
    order = [
        rows.tolist()
        for epoch in range(STEPS * batch // 24 + 1)
        for rows in step_batches(np.zeros(24), seed=42, epoch=epoch, global_batch=batch, group_by_length=False)
    ]
    losses, norms = stock_losses(base, data, order[:STEPS], quantize)
    assert len(log) == STEPS
    assert losses[-1] < losses[0] - 0.3  # something was learned
    worst = max(abs(record["loss"] / loss - 1) for record, loss in zip(log, losses, strict=True))
    print(f"largest relative difference of a loss: {worst:.1e}")
    for record, loss, norm in zip(log, losses, norms, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-4), record["step"]
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-3), record["step"]


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_tiny_model(tiny_llama_folder: Path, tmp_path: Path, quantize: str) -> None:
    compare(tiny_llama_folder, tmp_path, quantize, batch=4)


@pytest.mark.model
def test_smollm2(smollm2_folder: Path, tmp_path: Path) -> None:
    compare(smollm2_folder, tmp_path, "none", batch=2)
