"""Merged equals base + adapter, for every kind of adapter; reloaded by stock transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from frugal.errors import CheckpointError, ConfigError, UnsupportedError
from frugal.exports.registry import merge
from tests.support.merged import IDS, logits_here, logits_in_new_process, logits_of, make_run
from tests.support.tiny_models import tiny_model

Make = Callable[..., Path]


def keys_of(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), "pt") as handle:
            for key in handle.keys():  # noqa: SIM118
                tensor = handle.get_tensor(key)
                found[key] = (tensor.dtype, tuple(tensor.shape))
    return found


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 32}},
    "some layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "regex": {"target_modules": r".*layers\.0\.mlp\..*_proj"},
    "bias of the update": {"lora_bias": True, "target_modules": ["q_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {"trainable_token_indices": [3, 299]},
    "head whole": {"modules_to_save": ["lm_head"]},
    "embedding whole": {"modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_equals_base_and_adapter(kind: str, tied: bool, make_tiny_llama: Make, tmp_path: Path) -> None:
    bias = {"attention_bias": True} if kind == "bias of the update" else {}
    base = make_tiny_llama(tie_word_embeddings=tied, **bias)
    model = make_run(tmp_path / "run", base, **ADAPTERS[kind])
    report = merge(tmp_path / "run", tmp_path / "out")
    assert report.weights == "dequantized"
    torch.testing.assert_close(logits_here(tmp_path / "out"), logits_of(model), rtol=1e-4, atol=2e-5)
    changed = kind in ("embedding", "head whole", "embedding whole")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is (tied and not changed)
    assert ("lm_head.weight" in keys_of(tmp_path / "out")) is not config["tie_word_embeddings"]


def test_a_tied_table_that_was_trained_whole_stays_tied(make_tiny_llama: Make, tmp_path: Path) -> None:
    """U21: PEFT saves it under both names; the merge compared the names and said that they differ."""
    base = make_tiny_llama(tie_word_embeddings=True)
    model = make_run(tmp_path / "run", base, modules_to_save=["lm_head"], ensure_weight_tying=True)
    tables = [name for name in load_file(tmp_path / "run" / "adapter_model.safetensors") if "lora" not in name]
    assert len(tables) == 2
    report = merge(tmp_path / "run", tmp_path / "out")
    assert report.tied == "head stays tied to the embedding"
    assert "lm_head.weight" not in keys_of(tmp_path / "out")
    torch.testing.assert_close(logits_here(tmp_path / "out"), logits_of(model), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_new_process_gives_the_same_logits(tiny_llama_folder: Path, tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", tiny_llama_folder)
    merge(tmp_path / "run", tmp_path / "out", max_shard_bytes=100_000)
    got = logits_in_new_process(tmp_path / "out", tmp_path)
    assert float((got - logits_of(model)).abs().max()) < 1e-3
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        dtype.itemsize * torch.Size(shape).numel() for dtype, shape in keys_of(tmp_path / "out").values()
    )


@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_shards_and_half_precision(quantize: str, make_tiny_llama: Make, tmp_path: Path) -> None:
    base = make_tiny_llama(dtype=torch.bfloat16)
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(sharded, max_shard_size="50KB")
    AutoTokenizer.from_pretrained(base).save_pretrained(sharded)
    model = make_run(tmp_path / "run", sharded, quantize=quantize)
    merge(tmp_path / "run", tmp_path / "exact", dtype="float32")
    torch.testing.assert_close(logits_here(tmp_path / "exact"), logits_of(model), rtol=1e-4, atol=2e-5)
    report = merge(tmp_path / "run", tmp_path / "out")
    assert report.dtype == "bfloat16"
    assert {dtype for dtype, _ in keys_of(tmp_path / "out").values()} == {torch.bfloat16}
    # one rounding to 8 bits of mantissa: at most 2^-9 of each weight
    exact, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "out"))
    assert all(torch.equal(exact[key].to(torch.bfloat16), rounded[key]) for key in exact)
    assert 0 < report.difference["rounding_error_over_update"] < 0.1


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3_text", "phi3", "granite", "olmo2"])
def test_families(family: str, tiny_llama_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model(family, vocab_size=300, attn_implementation="eager").save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_llama_folder).save_pretrained(base)
    model = make_run(tmp_path / "run", base)
    merge(tmp_path / "run", tmp_path / "out")
    torch.testing.assert_close(logits_here(tmp_path / "out"), logits_of(model), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_weights_stored_transposed(dora: bool, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """GPT-2's Conv1D keeps [in, out] (`fan_in_fan_out`), and its files leave the `transformer.` prefix out."""
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0, resid_pdrop=0)
    base = tmp_path / "base"
    GPT2LMHeadModel(config).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_llama_folder).save_pretrained(base)
    model = make_run(
        tmp_path / "run", base, quantize="none", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_dora=dora
    )
    merge(tmp_path / "run", tmp_path / "out")
    torch.testing.assert_close(logits_here(tmp_path / "out"), logits_of(model), rtol=1e-4, atol=2e-5)


def test_an_existing_folder_is_left_alone(tiny_llama_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        merge(tmp_path / "run", tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    merge(tmp_path / "run", tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_failure_leaves_nothing(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    with pytest.raises((CheckpointError, KeyError)):
        merge(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("frugal.exports.base.shutil.disk_usage", lambda folder: usage)
    (tmp_path / "run" / "tokenizer.json").write_bytes((tiny_llama_folder / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"1\.0 kB free"):
        merge(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_wrong_choices_are_named(tiny_llama_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    with pytest.raises(ConfigError, match="dequantized and original"):
        merge(tmp_path / "run", tmp_path / "out", weights="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bfloat16"):
        merge(tmp_path / "run", tmp_path / "out", dtype="int8")
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    config["init_lora_weights"] = "pissa"
    (tmp_path / "run" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="pissa"):
        merge(tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match="does not exist"):
        merge(tmp_path / "nowhere", tmp_path / "out")


def test_a_run_that_was_not_quantised(tiny_llama_folder: Path, tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", tiny_llama_folder, quantize="none")
    report = merge(tmp_path / "run", tmp_path / "out")
    assert report.weights == "original"
    assert report.difference["quantization_error_over_weights"] == 0
    assert report.difference["update_over_weights"] > 0.01
    torch.testing.assert_close(logits_here(tmp_path / "out"), logits_of(model), rtol=1e-4, atol=2e-5)
    assert IDS.shape == (1, 8)
