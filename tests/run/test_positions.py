"""The data's limit and the model's are compared before weights are read; generation ends where positions do (F12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import frugal
from frugal.errors import ConfigError, DataError
from frugal.models.positions import per_call_rotary, positions, refuse_mixed_lengths
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


LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 16,
        "factor": 8.0,
    },
}


def test_rotary_factors_of_a_call_change_shorter_rows() -> None:
    """F-list: what the rule below is about. A row of 9 tokens beside one of 40, beyond the original 16."""
    config = tiny_config("phi3", **LONGROPE)
    assert per_call_rotary(config) == 16
    assert per_call_rotary(tiny_config("llama")) is None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 131, (2, 40))
    for longest, changes in ((16, False), (40, True)):
        mask = torch.ones(2, longest, dtype=torch.int64)
        mask[0, 9:] = 0
        with torch.no_grad():
            beside = model(input_ids=ids[:, :longest], attention_mask=mask, use_cache=False).logits[0, :9]
            alone = model(input_ids=ids[:1, :9], use_cache=False).logits[0]
        assert bool((beside - alone).abs().max() > 1e-4) is changes


@pytest.mark.parametrize(
    ("lengths", "size", "packing", "message"),
    [
        ([9, 40], 2, False, r"1 of 2 rows are longer than 16 tokens.*Write train\.x: 1 \(and more"),
        ([9, 40], 1, True, r"Write data\.packing: false, or data\.max_length: 16"),
        ([9, 40], 4, True, r"train\.x: 1 .* and data\.packing: false"),
        ([9, 40], 1, False, None),
        ([9, 16], 4, True, None),
        ([17, 40], 4, True, None),
    ],
)
def test_rows_on_both_sides_of_the_original_length(
    lengths: list[int], size: int, packing: bool, message: str | None
) -> None:
    found = np.array(lengths)
    if message is None:
        refuse_mixed_lengths(16, found, size, "train.x", packing=packing)
        return
    with pytest.raises(ConfigError, match=message):
        refuse_mixed_lengths(16, found, size, "train.x", packing=packing)


def test_a_run_with_mixed_lengths_is_refused_before_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(300)
    config = tiny_config("phi3", **{**LONGROPE, "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"text": "hello"}, {"text": "hello world " * 10}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 2))
    asked = runs.config(tmp_path / "base", tmp_path / "rows.jsonl", tmp_path / "run")
    asked["train"].update(per_device_train_batch_size=2, gradient_accumulation_steps=1)
    monkeypatch.setattr("frugal.run.train.load_model", None)
    with pytest.raises(ConfigError, match=r"train\.per_device_train_batch_size: 1"):
        train(asked)
