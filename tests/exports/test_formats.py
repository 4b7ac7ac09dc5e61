"""Formats by name: the adapter of a checkpoint in a folder of its own, and requests that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from frugal.errors import CheckpointError, ConfigError
from frugal.exports.registry import FORMATS, export
from tests.support.merged import logits_of, make_run


def test_the_adapter_in_a_folder_of_its_own_is_what_stock_peft_loads(tiny_llama_folder: Path, tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", tiny_llama_folder, quantize="none")
    report = export(tmp_path / "run", tmp_path / "alone", "adapter")
    assert any("alone" in line for line in report.lines())
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_folder)
    stock = PeftModel.from_pretrained(base, tmp_path / "alone").eval()
    torch.testing.assert_close(logits_of(stock), logits_of(model), rtol=1e-4, atol=2e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "alone")) == 300
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_unknown_formats_and_options_are_named(tiny_llama_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    with pytest.raises(ConfigError, match=f"must be one of {', '.join(FORMATS)}; got 'gguff'"):
        export(tmp_path / "run", tmp_path / "out", "gguff")
    with pytest.raises(ConfigError, match="takes no options; got dtype"):
        export(tmp_path / "run", tmp_path / "out", "adapter", dtype="float16")
    with pytest.raises(ConfigError, match="colour"):
        export(tmp_path / "run", tmp_path / "out", "merged", colour="red")
    with pytest.raises(CheckpointError, match="does not exist"):
        export(tmp_path / "nowhere", tmp_path / "out", "adapter")
    assert not (tmp_path / "out").exists()
