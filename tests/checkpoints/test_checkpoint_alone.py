"""A checkpoint folder moved away from its run is whole: it can be chatted with, merged and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from frugal.exports.registry import merge
from frugal.inference.load import load_run
from frugal.run.train import train
from tests.support import runs

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> tuple[Path, Path]:
    """(the run, a copy of its last checkpoint elsewhere)"""
    root = tmp_path_factory.mktemp("alone")
    (root / "mine.jinja").write_text(TEMPLATE)
    sections: dict[str, Any] = {
        "model": {"quantize": "nf4", "add_tokens": ["<a>", "<b>"]},
        "data": {"chat_template": str(root / "mine.jinja"), "system_prompt": "be brief"},
        "train": {"max_steps": 4},
    }
    config = runs.config(tiny_llama_folder, runs.write_rows(root / "rows.jsonl"), root / "run", **sections)
    train(config)
    away = root / "elsewhere" / "my adapter"
    shutil.copytree(root / "run" / "checkpoint-4", away)
    return root / "run", away


def test_it_answers_as_the_run_does(moved: tuple[Path, Path]) -> None:
    run, away = moved
    whole, alone = load_run(run, device="cpu"), load_run(away, device="cpu")
    ids = torch.tensor([[1, 5, 300, 9, 301]])
    with torch.no_grad():
        assert torch.equal(whole.model(input_ids=ids).logits, alone.model(input_ids=ids).logits)
    assert len(alone.tokenizer) == len(whole.tokenizer) == 302
    assert alone.tokenizer.chat_template == whole.tokenizer.chat_template == TEMPLATE
    assert alone.system_prompt == "be brief"
    assert alone.generation == whole.generation
    assert alone.generation["eos_token_id"] == [2]
    assert alone.answer("hello", max_new_tokens=8) == whole.answer("hello", max_new_tokens=8)
    assert alone.warnings == []


def test_it_merges_as_the_run_does(moved: tuple[Path, Path], tmp_path: Path) -> None:
    run, away = moved
    merge(run, tmp_path / "whole")
    merge(away, tmp_path / "alone")
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "alone"))
    assert first.read_bytes() == second.read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "alone").chat_template == TEMPLATE
    assert "quantization_config" not in json.loads((tmp_path / "alone" / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "alone").get_input_embeddings().weight.shape[0] == 302


def test_another_base_is_noticed(moved: tuple[Path, Path], make_tiny_llama: Any) -> None:
    """The fingerprint of the base travels in the checkpoint."""
    _, away = moved
    assert len(load_run(away, device="cpu", base=make_tiny_llama(seed=5)).warnings) == 1
