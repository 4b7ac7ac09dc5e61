"""One builder: a model without memory is, but for its numbers, the model that is loaded from files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.adapters import save_adapter
from frugal.config import LoraSection
from frugal.models.build import BuiltModel, ModelSpec, build
from frugal.models.load import Weights
from frugal.models.resolve import ResolvedModel
from tests.support.tiny_models import FAMILIES, tiny_model

LORA = LoraSection(r=4, lora_alpha=8)


def saved(folder: Path, family: str = "llama", **changes: Any) -> ModelSpec:
    tiny_model(family, **changes).to(torch.bfloat16).save_pretrained(folder)
    return ModelSpec(source=ResolvedModel("tiny", folder, "folder", None), lora=LORA, seed=3)


def described(built: BuiltModel) -> dict[str, Any]:
    """Everything but numbers: classes of modules; shape, dtype and training of every tensor; what was decided."""
    return {
        "modules": {name: type(module) for name, module in built.model.named_modules()},
        "tensors": {
            name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for name, tensor in [*built.model.named_parameters(), *built.model.named_buffers()]
        },
        "attention": built.attention.value,
        "adapter": built.adapter_lines,
        "head": None if built.head is None else (built.head.exact, built.head.softcap),
        "replaced": [] if built.replacements is None else [(r.name, r.became) for r in built.replacements.rows],
        "bytes": built.report.bytes_by_kind,
        "parameters": built.report.parameters,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_without_memory_it_is_the_same_model(family: str, tmp_path: Path) -> None:
    spec = saved(tmp_path, family)
    with_memory, without = build(spec), build(spec, "meta")
    assert described(without) == described(with_memory)
    assert not any(p.is_meta for p in with_memory.model.parameters())
    assert all(p.is_meta for p in without.model.parameters())
    kept = sum(tensor.kept_bytes for tensor in without.tensors)
    assert kept == sum(p.nbytes for p in without.base.parameters() if not p.requires_grad) + _nested_scales(without)


def _nested_scales(built: BuiltModel) -> int:
    return sum(b.nbytes for name, b in built.model.named_buffers() if name.endswith(("nested_absmax", "offset")))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantize": "none"},
        {"dtype": torch.bfloat16, "double_quant": False},
        {"embedding": "host"},
        {"lora": LoraSection(r=4, use_dora=True)},
        {"lora": LoraSection(r=4, init_lora_weights="pissa"), "quantize": "none"},
        {"new_token_ids": (129, 130)},
        {"attention": None, "fused": False, "split_head": False},
        {"lora": None},
    ],
)
def test_settings_reach_both(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = replace(saved(tmp_path, tie_word_embeddings=False), **changes)
    assert described(build(spec, "meta")) == described(build(spec))


def test_a_trained_adapter_is_put_on(tmp_path: Path) -> None:
    spec = saved(tmp_path / "base")
    fresh = build(spec)
    with torch.no_grad():
        for name, parameter in fresh.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.25)
    save_adapter(fresh.model, tmp_path / "adapter")
    again = build(replace(spec, lora=None, adapter=tmp_path / "adapter", trainable=False))
    assert again.applied is None
    assert not any(p.requires_grad for p in again.model.parameters())
    want, got = dict(fresh.model.named_parameters()), dict(again.model.named_parameters())
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("weights", ["files", "layerwise", "meta"])
def test_the_place_of_the_embedding_is_reported(weights: Weights, tmp_path: Path) -> None:
    spec = replace(saved(tmp_path, tie_word_embeddings=False), embedding="host")
    assert "only the rows in use" in build(spec, weights).report.embedding
