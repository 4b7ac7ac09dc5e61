"""C03: layer patterns that match nothing, or only some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frugal.adapters import Applied, apply_adapters
from frugal.adapters.targets import resolve_targets, tied_too
from frugal.config import LoraSection
from frugal.errors import ConfigError
from frugal.models.load import load_base
from frugal.models.resolve import resolve_base
from frugal.models.skeleton import build_meta
from tests.support.tiny_models import tiny_config


def apply(folder: Path, **settings: Any) -> Applied:
    return apply_adapters(load_base(resolve_base(str(folder))).model, LoraSection(**settings), seed=0)


def test_the_table(tiny_llama_folder: Path) -> None:
    applied = apply(
        tiny_llama_folder,
        target_modules=["q_proj", "layers.1.mlp.up_proj"],
        rank_pattern={"q_proj": 2},
        modules_to_save=["lm_head"],
    )
    lines = applied.lines()
    assert "target_modules 'q_proj': 2 layers" in lines
    assert "target_modules 'layers.1.mlp.up_proj': 1 layers" in lines
    assert "rank_pattern 'q_proj' = 2: 2 layers" in lines
    assert "modules_to_save 'lm_head': 1 layers" in lines


def test_two_tables_do_not_hide_each_other(tiny_llama_folder: Path) -> None:
    applied = apply(
        tiny_llama_folder,
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 32},
    )
    scale = {name: layer.scale for name, layer in applied.layers.items()}
    assert scale["model.layers.1.self_attn.q_proj"] == 32 / 2
    assert scale["model.layers.0.self_attn.q_proj"] == 16 / 2
    assert scale["model.layers.0.self_attn.v_proj"] == 16 / 8
    for name, expected in scale.items():  # what PEFT computes with, not what we believe
        layer = applied.model.base_model.model.get_submodule(name)
        assert layer.scaling["default"] == expected
        assert layer.lora_A["default"].weight.shape[0] == (2 if name.endswith("q_proj") else 8)


@pytest.mark.parametrize("pattern", ["q_proj", "model.layers.1.self_attn.q_proj", r"layers\.1\..*q_proj"])
def test_alpha_by_name_path_or_expression(tiny_llama_folder: Path, pattern: str) -> None:
    applied = apply(tiny_llama_folder, r=8, lora_alpha=16, target_modules=["q_proj"], alpha_pattern={pattern: 64})
    assert applied.layers["model.layers.1.self_attn.q_proj"].scale == 8


@pytest.mark.parametrize("table", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["^q_proj", "nope", "k_proj"])
def test_a_pattern_without_a_match_stops(tiny_llama_folder: Path, table: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora\.{table}: .*matches no layer") as caught:
        apply(tiny_llama_folder, target_modules=["q_proj"], **{table: {pattern: 4}})
    if pattern == "^q_proj":
        assert "write `q_proj`, not `^q_proj`" in str(caught.value)
        assert "Near names: q_proj" in str(caught.value)


def test_a_pattern_that_an_earlier_one_hides_stops(tiny_llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="taken by an earlier pattern"):
        apply(tiny_llama_folder, rank_pattern={"q_proj": 2, "self_attn.q_proj": 4})


@pytest.mark.parametrize("entry", ["not_there", ".*_proj", "^q_proj"])
def test_a_list_entry_without_a_match_stops(tiny_llama_folder: Path, entry: str) -> None:
    with pytest.raises(ConfigError, match=r"lora\.target_modules: .*matches no layer"):
        apply(tiny_llama_folder, target_modules=["q_proj", entry])


def test_one_text(tiny_llama_folder: Path) -> None:
    """A single text is a name, or a regular expression over full names."""
    assert len(apply(tiny_llama_folder, target_modules="q_proj").layers) == 2
    assert len(apply(tiny_llama_folder, target_modules=r".*layers\.0.*(q|v)_proj").layers) == 2
    with pytest.raises(ConfigError, match="matches no layer"):
        apply(tiny_llama_folder, target_modules=r"layers\.9.*")


@pytest.mark.parametrize(
    ("saved", "tied", "said"),
    [
        (["lm_head"], True, "lm_head is tied to model.embed_tokens: they are one table of 131 x 48 values"),
        (["embed_tokens"], True, "embed_tokens is tied to lm_head"),
        (["lm_head", "embed_tokens"], True, None),
        (["lm_head"], False, None),
        ([], True, None),
    ],
)
def test_the_other_half_of_a_tied_table_is_said(saved: list[str], tied: bool, said: str | None) -> None:
    """U21: from the model without memory, before training."""
    model = build_meta(tiny_config("llama", tie_word_embeddings=tied), trust_remote_code=False)
    found = tied_too(model, LoraSection(modules_to_save=saved))
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize("targets", [["embed_tokens", "q_proj"], r".*(embed_tokens|q_proj)"])
def test_dora_on_an_embedding_is_refused_before_training(targets: list[str] | str) -> None:
    """U21: it was trained, and refused at the merge."""
    model = build_meta(tiny_config("llama"), trust_remote_code=False)
    with pytest.raises(ConfigError, match=r"lora.use_dora: model.embed_tokens is an embedding"):
        resolve_targets(model, LoraSection(target_modules=targets, use_dora=True))
    resolve_targets(model, LoraSection(target_modules=targets))
    resolve_targets(model, LoraSection(use_dora=True, modules_to_save=["embed_tokens"]))
