"""Loading: quantised while read, nothing random, nothing missing, little host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional as bnb
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from frugal.codecs.nf4 import NF4Linear
from frugal.errors import ModelError
from frugal.models.load import load_base
from frugal.models.resolve import ResolvedModel, resolve_base
from frugal.tensor_files import read_header

IDS = torch.tensor([[1, 5, 9, 200, 17, 33]])


def source(folder: Path) -> ResolvedModel:
    return ResolvedModel("tiny", folder, "folder", None)


def logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=ids).logits
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_unquantised_is_the_stock_model(make_tiny_llama: Callable[..., Path], dtype: torch.dtype, tied: bool) -> None:
    folder = make_tiny_llama(dtype=dtype, tie_word_embeddings=tied)
    loaded = load_base(source(folder), quantize="none")
    assert loaded.report.route == "streamed"
    assert loaded.report.tied_head == tied
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded.model), logits(stock), atol=1e-6, rtol=1e-6)
    assert loaded.report.parameters == sum(p.numel() for p in stock.parameters())
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training


@pytest.mark.parametrize("double", [True, False])
def test_codes_are_those_of_a_stock_bitsandbytes_model(tiny_llama_folder: Path, double: bool) -> None:
    loaded = load_base(source(tiny_llama_folder), double_quant=double)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    stock = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32, quantization_config=config)
    assert len(loaded.report.quantized) == 14
    for name in loaded.report.quantized:
        theirs, ours = stock.get_submodule(name).weight, loaded.model.get_submodule(name)
        assert isinstance(ours, NF4Linear)
        assert torch.equal(ours.weight.flatten(), theirs.data.flatten())
        assert torch.equal(ours.dequantize(), bnb.dequantize_4bit(theirs.data, theirs.quant_state))
    torch.testing.assert_close(logits(loaded.model), logits(stock.train()), atol=1e-4, rtol=1e-4)


def test_a_checkpoint_in_shards(make_tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tiny_llama()
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load_base(source(tmp_path)).model), logits(load_base(source(folder)).model))


def test_missing_weights_are_listed(make_tiny_llama: Callable[..., Path]) -> None:
    folder = make_tiny_llama()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gone = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    save_file({name: value for name, value in tensors.items() if name not in gone}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"):
        load_base(source(folder))


def test_names_with_and_without_the_prefix(make_tiny_llama: Callable[..., Path]) -> None:
    """A checkpoint saved from the inner model has no `model.` before its names."""
    folder = make_tiny_llama()
    expected = logits(load_base(source(folder)).model)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file({**bare, "rotary_emb.inv_freq": torch.ones(2), "extra": torch.ones(1)}, folder / "model.safetensors")
    loaded = load_base(source(folder))
    assert loaded.report.route == "streamed"
    assert loaded.report.unexpected == ["extra"]
    assert torch.equal(logits(loaded.model), expected)


def test_a_tied_weight_under_the_heads_name(make_tiny_llama: Callable[..., Path]) -> None:
    folder = make_tiny_llama()
    expected = logits(load_base(source(folder)).model)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    loaded = load_base(source(folder))
    assert loaded.report.tied_head
    assert torch.equal(logits(loaded.model), expected)


def test_a_damaged_file(make_tiny_llama: Callable[..., Path]) -> None:
    folder = make_tiny_llama()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"damaged.*beyond the end"):
        load_base(source(folder))
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="header does not fit"):
        load_base(source(folder))
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="damaged"):
        read_header(file)


def test_experts_of_one_matrix_each_are_stacked_while_they_are_read(tmp_path: Path) -> None:
    """Mixtral's w1, w3 and w2 become two stacks; more in test_load_experts.py."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    loaded = load_base(source(tmp_path))
    assert loaded.report.route == "streamed"
    assert len(loaded.report.quantized) == 8 + 2  # attention, and experts
    assert not any("experts" in name for name in loaded.report.kept)
    dense = load_base(source(tmp_path), quantize="none")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(dense.model), logits(stock), atol=1e-5, rtol=1e-5)


def test_layers_that_are_no_linear_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    loaded = load_base(source(tmp_path))
    assert loaded.report.quantized == []
    assert "Conv1D" in loaded.report.kept["transformer.h.0.attn.c_attn.weight"]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded.model), logits(stock), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "linear", "dynamic"])
def test_rotary_frequencies_are_the_stock_ones(make_tiny_llama: Callable[..., Path], scaling: str) -> None:
    """Buffers that no checkpoint holds must be computed, not left as they fell out of memory."""
    options: dict[str, Any] = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0}
    if scaling == "llama3":
        options |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    folder = make_tiny_llama(rope_parameters=options)
    loaded = load_base(source(folder), quantize="none")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = dict(stock.named_buffers())
    for name, buffer in loaded.model.named_buffers():
        assert torch.equal(buffer, theirs[name]), name
    ids = torch.randint(3, 300, (1, 300))
    torch.testing.assert_close(logits(loaded.model, ids), logits(stock, ids), atol=1e-5, rtol=1e-5)


def test_generation_config_and_reference(make_tiny_llama: Callable[..., Path]) -> None:
    folder = make_tiny_llama()
    values = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**values, "eos_token_id": [2, 7]}))
    loaded = load_base(resolve_base(str(folder)))
    assert loaded.model.generation_config.eos_token_id == [2, 7]
    assert loaded.model.name_or_path == str(folder)
    assert AutoConfig.from_pretrained(folder).vocab_size == 300


MEASURE = """
import os, re, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from frugal.models.load import load_base
from frugal.models.resolve import ResolvedModel
from frugal.codecs.nf4 import NF4Linear
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
source = ResolvedModel("big", Path(sys.argv[1]), "folder", None)
source.config(); torch.randn(64, 64) @ torch.randn(64, 64); NF4Linear.from_linear(torch.nn.Linear(64, 64))
before = status("VmRSS")
report = load_base(source, dtype=torch.float32).report
print(before, status("VmHWM"), report.total_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_host_memory_while_loading(tmp_path: Path) -> None:
    """A 0.3 GB checkpoint: at most the 4-bit size, the largest tensor and 0.1 GB above the libraries themselves."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    block = torch.randn(1 << 20).to(torch.bfloat16) * 0.02
    tensors = {
        name: block.repeat(-(shape.numel() // -len(block)))[: shape.numel()].view(shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = (tmp_path / "model.safetensors").stat().st_size
    assert checkpoint > 250e6
    largest = max(tensor.nbytes for tensor in tensors.values())
    del tensors
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    before, peak, resident = map(int, done.stdout.split())
    (tmp_path / "model.safetensors").unlink()
    assert peak - before <= resident + largest + 100e6, (before, peak, resident, largest)
    assert peak - before < checkpoint * 0.75
