"""Experts from checkpoints of every cut: held in NF4, matrix by matrix, by every way of loading; and trained over."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import frugal
from frugal.adapters.peft_model import EXPERTS, WEIGHTS
from frugal.checkpoints.run_folder import open_run
from frugal.config import LoraSection, load_config
from frugal.errors import CheckpointError, ModelError
from frugal.exports.registry import merge
from frugal.model_structure import stacked_experts
from frugal.models.build import ModelSpec, build
from frugal.models.load import load_base
from frugal.models.modules.experts import FrugalExperts, NF4Experts
from frugal.models.resolve import ResolvedModel
from frugal.run.steps import check_experts
from frugal.tensor_files import read_all, read_metadata, write_tensors
from tests.support import runs
from tests.support.merged import experts_in_nf4, make_run
from tests.support.tiny_models import MOE_FAMILIES, tiny_model


def saved(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ResolvedModel:
    tiny_model(family, **changes).to(dtype).save_pretrained(folder)
    return ResolvedModel("tiny", folder, "folder", None)


def held(model: Any) -> dict[str, NF4Experts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, NF4Experts)}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.arange(3, 33).view(2, 15)
    out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_model_is_stock_over_the_numbers_that_nf4_leaves(family: str, tmp_path: Path) -> None:
    source = saved(tmp_path, family)
    loaded = load_base(source)
    assert loaded.report.route == "streamed", loaded.report.route_reason
    assert loaded.report.expert_share == 0
    assert set(held(loaded.model)) == {n for n in loaded.report.quantized if n.endswith("experts")}
    assert any("experts, stacked in parameters: in NF4, frozen" in line for line in loaded.report.lines())
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name in loaded.report.quantized:
        module = stock.get_submodule(name)
        if name in held(loaded.model):
            experts_in_nf4(module)
        else:
            module.weight.data = loaded.model.get_submodule(name).dequantize()
    want, got = logits(stock), logits(loaded.model)
    assert float((got - want).abs().max()) <= 2e-5 * float(want.abs().max())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_every_way_of_loading_gives_the_same_model(family: str, tmp_path: Path) -> None:
    """Layer by layer, without memory, and dense."""
    spec = ModelSpec(source=saved(tmp_path, family), lora=LoraSection(r=2), seed=1)
    whole, by_layer, without = build(spec), build(spec, "layerwise"), build(spec, "meta")
    want = whole.model.state_dict()
    got = by_layer.model.state_dict()
    assert want.keys() == got.keys() == without.model.state_dict().keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in want.items())
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in want.items()}
    assert shapes == {n: (t.shape, t.dtype) for n, t in without.model.state_dict().items()}
    assert whole.report.bytes_by_kind == without.report.bytes_by_kind
    assert whole.report.parameters == tiny_model(family).num_parameters()
    one = max(part.read_bytes for part in without.tensors if ".experts." in part.name)
    assert one == 64 * 48 * 2  # one expert's gate and up in 16 bits


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_dense_experts_are_read_and_replaced_too(family: str, tmp_path: Path) -> None:
    source = saved(tmp_path, family)
    built = build(ModelSpec(source=source, quantize="none", lora=LoraSection(r=2)))
    assert built.report.route == "streamed"
    assert any(isinstance(module, FrugalExperts) for module in built.model.modules())
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert float((logits(built.model) - want).abs().max()) <= 2e-5 * float(want.abs().max())


def test_routers_that_must_be_float32_are(tmp_path: Path) -> None:
    """deepseek_v3's class demands it: rounding the bias of a choice changes the choice."""
    source = saved(tmp_path, "deepseek_v3", torch.float32)
    for weights in ("files", "meta"):
        model = load_base(source, dtype=torch.bfloat16, weights=weights).model
        routers = {n: t for n, t in model.state_dict().items() if re.search(r"gate\.(weight|e_score)", n)}
        assert len(routers) == 2
        assert {tensor.dtype for tensor in routers.values()} == {torch.float32}


def test_a_stack_that_lacks_a_matrix_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path, "qwen3_moe")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load_base(source)


def test_what_cannot_be_stacked_says_so(tmp_path: Path) -> None:
    """An expert of another size: transformers' own loading is asked, and its word is passed on."""
    source = saved(tmp_path, "qwen3_moe")
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises((ModelError, RuntimeError, ValueError)):
        load_base(source)


def test_a_step_trains_over_experts_and_their_stacks_stay(tmp_path: Path) -> None:
    source = saved(tmp_path, "qwen3_moe")
    built = build(ModelSpec(source=source, lora=LoraSection(r=2)))
    before = {name: tensor.clone() for name, tensor in built.model.state_dict().items() if ".experts." in name}
    ids = torch.arange(3, 33).view(2, 15)
    built.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    trained = [p for p in built.model.parameters() if p.requires_grad]
    assert any(p.grad is not None and p.grad.any() for p in trained)
    assert before
    assert all(torch.equal(tensor, built.model.state_dict()[name]) for name, tensor in before.items())
    assert not [n for n, m in built.model.named_modules() if stacked_experts(m) and not isinstance(m, FrugalExperts)]
    json.dumps(built.report.as_dict())


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_a_merge_is_the_trained_model(family: str, experts: bool, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """Experts are written as the run had them, whichever way the files cut them; dense ones of frugal 0.1.0 too."""
    base = tmp_path / "base"
    tiny_model(family, vocab_size=300).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_llama_folder).save_pretrained(base)
    trained = make_run(tmp_path / "run", base, experts=experts, target_modules=["q_proj", "o_proj"])
    loaded = frugal.load(tmp_path / "run", device="cpu").model
    assert any(isinstance(module, NF4Experts) for module in loaded.modules()) == experts
    assert float((logits(loaded) - logits(trained)).abs().max()) <= 2e-5 * float(logits(trained).abs().max())
    report = merge(tmp_path / "run", tmp_path / "out")
    assert report.weights == "dequantized"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert float((logits(merged) - logits(trained)).abs().max()) <= 2e-5 * float(logits(trained).abs().max())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_saved_and_made_dense_it_computes_the_same(family: str, tmp_path: Path) -> None:
    built = build(ModelSpec(source=saved(tmp_path / "base", family), fused=False))
    want = logits(built.base)
    built.base.save_pretrained(tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert float((logits(again) - want).abs().max()) <= 2e-5 * float(want.abs().max())
    dense = built.base.dequantize()
    assert not held(dense)
    assert float((logits(dense) - want).abs().max()) <= 2e-5 * float(want.abs().max())


def test_a_run_says_that_its_experts_were_in_nf4_and_one_that_does_not_is_not_gone_on_with(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    tiny_model("qwen3_moe", vocab_size=300).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_llama_folder).save_pretrained(base)
    config = runs.config(base, runs.write_rows(tmp_path / "rows.jsonl", 4), run, model={"base": str(base)})
    config["model"]["quantize"] = "nf4"
    config["train"]["max_steps"] = 2
    config["output"]["save_steps"] = 1
    frugal.train(config)
    assert open_run(run).quantized_experts
    checkpoint = run / "checkpoint-1"
    assert frugal.train(config, resume=checkpoint).steps == 2
    old = shutil.copytree(open_run(checkpoint).adapter, tmp_path / "old")  # the checkpoint itself is sealed
    said = read_metadata(old / WEIGHTS)
    assert said.pop(EXPERTS) == "nf4"
    write_tensors(old / WEIGHTS, read_all(old / WEIGHTS), texts=said)
    source = ResolvedModel("tiny", base, "folder", None)
    check_experts(load_config(config), source, checkpoint)
    with pytest.raises(CheckpointError, match=r"kept experts in 16 bits.*start a new run"):
        check_experts(load_config(config), source, old)
