"""A frugal model in other people's code (P01 to P05, P07): PEFT's merging, saving, loading and counting over NF4."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import frugal
from frugal.codecs.nf4 import NF4Linear
from frugal.errors import CheckpointError, ConfigError, UnsupportedError

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


@pytest.mark.parametrize(("safe", "for_training"), [(False, False), (True, False), (False, True)])
def test_merge_and_unload_gives_a_dense_model_with_the_same_answers(
    tiny_llama_folder: Path, safe: bool, for_training: bool, tmp_path: Path
) -> None:
    """P01, and P04: what it saves is loaded by transformers."""
    model = adapted(tiny_llama_folder, for_training=for_training)
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


def test_unload_and_save_pretrained_writes_dense_weights(model: Any, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """P04"""
    with model.disable_adapter():
        want = logits(model)
    base = model.unload()
    base.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(again), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(base.dequantize()), want, rtol=0, atol=1e-5)
    assert not any(isinstance(module, NF4Linear) for module in base.modules())
    again = adapted(tiny_llama_folder).dequantize(dtype=torch.bfloat16)
    assert {value.dtype for value in again.parameters()} == {torch.bfloat16}


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


@pytest.fixture(scope="module")
def bf16_folder(make_tiny_llama: Callable[..., Path]) -> Path:
    """The base as most are published: 16 bits, so tables stay in 16 bits while a CPU computes in float32."""
    return make_tiny_llama(dtype=torch.bfloat16)


def bare(folder: Path) -> Any:
    return frugal.load(str(folder), device="cpu").model.unload()


OWN = {"r": 2, "target_modules": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("way", ["peft", "frugal", "add_adapter"])
def test_rows_of_a_16_bit_table_are_trained(way: str, bf16_folder: Path) -> None:
    """P05: the same loss and gradients as stock PEFT over the dequantised base in float32."""
    config = LoraConfig(**OWN, trainable_token_indices=[7, 90], task_type="CAUSAL_LM", init_lora_weights=False)
    stock = get_peft_model(bare(bf16_folder).dequantize().float(), copy.deepcopy(config))
    if way == "add_adapter":
        model = frugal.load(str(bf16_folder), device="cpu").model
        model.add_adapter("own", config)
        model.set_adapter("own")
    else:
        model = (get_peft_model if way == "peft" else frugal.get_peft_model)(bare(bf16_folder), config)
    name = model.active_adapter
    own = {key.replace("default", name): value for key, value in stock.state_dict().items() if "default" in key}
    assert not model.load_state_dict(own, strict=False).unexpected_keys
    losses = []
    for each in (stock, model):
        loss = each(IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    found = dict(model.named_parameters())
    trained = {key: value.grad for key, value in stock.named_parameters() if value.grad is not None}
    assert any("trainable_tokens_delta" in key for key in trained)
    for key, gradient in trained.items():
        torch.testing.assert_close(found[key.replace("default", name)].grad, gradient, rtol=1e-4, atol=1e-6)
    if way != "peft":
        want = logits(model.eval())
        torch.testing.assert_close(logits(model.merge_and_unload()), want, rtol=0, atol=1e-5)


def test_olora_takes_its_start_out_of_the_4_bit_base(bf16_folder: Path, tmp_path: Path) -> None:
    """P05: as over bitsandbytes, the rest is quantised again; the saved adapter finds the same base."""
    config = LoraConfig(**OWN, init_lora_weights="olora")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    stock = get_peft_model(bare(bf16_folder).dequantize(), copy.deepcopy(config)).get_submodule(name)
    model = frugal.get_peft_model(bare(bf16_folder), config)
    layer = model.get_submodule(name)
    assert isinstance(layer.base_layer, NF4Linear)
    assert torch.equal(layer.get_delta_weight("default"), stock.get_delta_weight("default"))
    assert torch.equal(layer.base_layer.dequantize(), NF4Linear.from_linear(stock.base_layer).dequantize())
    want = logits(model)
    model.save_pretrained(tmp_path)
    again = frugal.load(tmp_path, base=bf16_folder, device="cpu")
    torch.testing.assert_close(logits(again.model), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(again.model.merge_and_unload()), want, rtol=0, atol=1e-5)


def test_a_config_of_your_own_merges_and_remembers_its_base(bf16_folder: Path, tmp_path: Path) -> None:
    """P01, P02: layers that `frugal.get_peft_model` and `add_adapter` put on merge too, beside those of frugal."""
    model = frugal.get_peft_model(bare(bf16_folder), LoraConfig(**OWN, init_lora_weights=False))
    assert frugal.load(str(bf16_folder), device="cpu").model.base_record == model.base_record
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    want = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), want, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert torch.equal(logits(model), want)
    with pytest.raises(UnsupportedError, match=r"LoraConfig, got IA3Config.*dequantize"):
        frugal.get_peft_model(model.unload(), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))


def test_whole_modules_are_named_as_peft_names_them(bf16_folder: Path) -> None:
    """P05: by the end of a name; the copy is float32 and trains."""
    model = frugal.get_peft_model(bare(bf16_folder), LoraConfig(**OWN, modules_to_save=["embed_tokens"]))
    model(IDS, labels=IDS).loss.backward()
    saved = model.get_base_model().get_input_embeddings().modules_to_save["default"]
    assert saved.weight.dtype == torch.float32
    assert saved.weight.grad.abs().sum() > 0
    with pytest.raises(UnsupportedError, match="is stored in NF4"):
        frugal.get_peft_model(
            bare(bf16_folder), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["up_proj"])
        )


def test_a_table_of_the_base_beside_its_adapter_is_no_stranger(
    make_tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """PEFT writes the base's embedding with an adapter of it (save_embedding_layers); another table is refused."""
    folder = make_tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=False)
    config = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    stock = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()
    stock.save_pretrained(tmp_path / "adapter")
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert name in tensors
    loaded = frugal.load(tmp_path / "adapter", base=folder, quantize="none", device="cpu")
    torch.testing.assert_close(logits(loaded.model), logits(stock), rtol=0, atol=1e-5)
    frugal.merge(tmp_path / "adapter", tmp_path / "merged", base=folder, dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(stock), rtol=0, atol=1e-5)
    save_file({**tensors, name: tensors[name] + 1}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: .*embed_tokens\.base_layer"):
        frugal.load(tmp_path / "adapter", base=folder, quantize="none", device="cpu")


def test_dtype_is_that_of_the_computation_and_follows_to(bf16_folder: Path) -> None:
    """P07"""
    model = adapted(bf16_folder)
    table = model.get_base_model().get_input_embeddings()
    assert (model.dtype, logits(model).dtype, table.weight.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    want = logits(model)
    model.to(torch.bfloat16)
    assert (model.dtype, logits(model).dtype) == (torch.bfloat16, torch.bfloat16)
    assert 0 < float((logits(model).float() - want).abs().max()) < 0.1
    merged = model.merge_and_unload()
    assert {value.dtype for value in merged.state_dict().values()} == {torch.bfloat16}
    torch.testing.assert_close(logits(merged).float(), want, rtol=0, atol=0.1)
