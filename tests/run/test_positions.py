"""The data's limit and the model's are compared before weights are read; generation ends where positions do (F12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import frugal
from frugal.errors import DataError
from frugal.models.positions import positions
from frugal.run.train import train
from tests.conftest import make_tokenizer
from tests.support import runs
from tests.support.tiny_models import tiny_config

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 80, "max_position_embeddings": 64, "dropout": 0.0},
    "llama": {"max_position_embeddings": 64},
}  # fmt: skip


def base_of(family: str, folder: Path) -> Path:
    tokenizer = make_tokenizer(300)
    config = AutoConfig.for_model(family, **{
        "vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        **SHAPES[family],
    })  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def long_rows(path: Path) -> Path:
    path.write_text("\n".join(json.dumps({"text": "hello world " * 60}) for _ in range(4)))
    return path


@pytest.mark.parametrize(("family", "learned"), [("gpt2", True), ("opt", True), ("llama", False)])
def test_rows_beyond_the_positions(
    family: str, learned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_of(family, tmp_path / "base")
    config = runs.config(base, long_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    config["train"].update(max_steps=1)

    def load(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("weights are read now")

    monkeypatch.setattr("frugal.run.train.load_model", load)
    message = r"64 positions, and \d+ of 20 train rows are longer \(\d+ tokens the longest\).*data\.max_length: 64"
    if learned:
        for action in (train, frugal.preview):
            with pytest.raises(DataError, match=message):
                action(config)
        return
    with pytest.raises(RuntimeError, match="weights are read now"):
        train(config)
    assert "warning: the model was made for 64 positions, and 20 of 20 train rows are longer" in capsys.readouterr().out
    assert any("made for 64 positions" in note for note in frugal.preview(config).notes)


def test_rows_within_the_positions_say_nothing(tmp_path: Path) -> None:
    base = base_of("gpt2", tmp_path / "base")
    config = runs.config(base, long_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    config["data"].update(max_length=64)
    assert not [note for note in frugal.preview(config).notes if "positions" in note]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_answers_end_where_the_positions_do(family: str, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    config = runs.config(base, runs.write_rows(tmp_path / "rows.jsonl", 4), tmp_path / "run")
    config["data"].update(max_length=48)
    config["train"].update(max_steps=1)
    train(config)
    loaded = frugal.load(tmp_path / "run")
    loaded.answer("hello world " * 3, max_new_tokens=500)  # ended in an IndexError


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "phi3"])
def test_rotary_positions_are_not_learned(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    found = positions(model.config, model)
    assert found is not None
    assert not found.learned
