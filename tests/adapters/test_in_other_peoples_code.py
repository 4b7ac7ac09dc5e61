"""A frugal model in other people's code (P01 to P04, P07): PEFT's merging, saving, loading and counting over NF4."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import frugal
from frugal.codecs.nf4 import NF4Linear
from frugal.errors import ConfigError, UnsupportedError

IDS = torch.tensor([[1, 20, 7, 90, 4, 33, 2]])


def adapted(folder: Path, **options: Any) -> Any:
    """A frugal model whose adapter changes something."""
    model, _ = frugal.load(str(folder), lora={"r": 4, "lora_alpha": 8}, device="cpu", **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(IDS).logits
    return out


@pytest.fixture
def model(tiny_llama_folder: Path) -> Any:
    return adapted(tiny_llama_folder)


@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unload_gives_a_dense_model_with_the_same_answers(model: Any, safe: bool, tmp_path: Path) -> None:
    """P01, and P04: what it saves is loaded by transformers."""
    want = logits(model)
    merged = model.merge_and_unload(safe_merge=safe)
    assert not any(isinstance(module, NF4Linear) for module in merged.modules())
    torch.testing.assert_close(logits(merged), want, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(again), want, rtol=0, atol=1e-5)


def test_merge_adapter_and_back_is_bit_exact(model: Any) -> None:
    """P01: TRL merges, sends the weights and unmerges at every sync."""
    want = logits(model)
    packed = {name: value.clone() for name, value in model.state_dict().items()}
    model.merge_adapter()
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert torch.equal(logits(model), want)
    after = model.state_dict()
    assert after.keys() == packed.keys()
    assert all(torch.equal(after[name], value) for name, value in packed.items())


def test_two_adapters_merge_and_a_broken_one_changes_nothing(model: Any) -> None:
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    want = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert torch.equal(logits(model), want)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["other"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert isinstance(layer.base_layer, NF4Linear)
    assert not layer.merged


def test_unload_and_save_pretrained_writes_dense_weights(model: Any, tmp_path: Path) -> None:
    """P04"""
    with model.disable_adapter():
        want = logits(model)
    base = model.unload()
    base.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(again), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(base.dequantize()), want, rtol=0, atol=1e-5)
    assert not any(isinstance(module, NF4Linear) for module in base.modules())


def test_what_it_was_trained_on_travels_when_peft_saves(model: Any, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """P02: the adapter comes back over NF4, or says why not; stock PEFT loads it without a word."""
    want = logits(model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["frugal_base_quantize"] == "nf4"
    assert torch.equal(logits(frugal.load(tmp_path, device="cpu").model), want)
    assert torch.equal(logits(frugal.load(tmp_path, device="cpu", quantize="nf4").model), want)
    with pytest.raises(UnsupportedError, match="trained on a base with quantize='nf4'"):
        frugal.load(tmp_path, device="cpu", quantize="none")
    with pytest.raises(ConfigError, match="lora"):
        frugal.load(tmp_path, lora={"r": 8})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama_folder), tmp_path)


def test_an_adapter_of_another_tool_takes_the_argument(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """P02: nothing says what it was trained on, so `quantize` decides; 16 bits where it is left out."""
    stock = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama_folder), LoraConfig(r=2, target_modules=["q_proj"])
    )
    stock.save_pretrained(tmp_path)
    for quantize, found in ((None, False), ("none", False), ("nf4", True)):
        loaded = frugal.load(tmp_path, base=tiny_llama_folder, device="cpu", quantize=quantize).model
        assert any(isinstance(module, NF4Linear) for module in loaded.modules()) is found


def test_a_model_with_nothing_to_train_says_so(model: Any, tmp_path: Path) -> None:
    """P03"""
    model.save_pretrained(tmp_path)
    frozen = frugal.load(tmp_path, device="cpu").model
    with pytest.warns(UserWarning, match="trainable=True"):
        frozen.train()
    trainable = frugal.load(tmp_path, device="cpu", trainable=True).model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainable.train()
    assert any(parameter.requires_grad for parameter in trainable.parameters())


def test_counts_are_those_of_the_dense_model(model: Any, tiny_llama_folder: Path) -> None:
    """P07: packed bytes are not parameters."""
    stock = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama_folder),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )
    assert model.get_nb_trainable_parameters() == stock.get_nb_trainable_parameters()
