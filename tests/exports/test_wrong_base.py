"""M05: an adapter on the wrong base is refused or noticed; the base that was named wins over what was stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frugal.errors import CheckpointError, FrugalError
from frugal.exports.registry import merge
from tests.support.merged import logits_here, logits_of, make_run

Make = Callable[..., Path]

WRONG_BASES = {
    "deeper": {"num_hidden_layers": 3},
    "shallower": {"num_hidden_layers": 1},
    "wider": {"hidden_size": 128},
    "wider mlp": {"intermediate_size": 192},
}


def load_into(base: Path, run: Path) -> None:
    """Through `frugal.inference.load.load_run`, which chat, eval and notebooks use."""
    from frugal.inference.load import load_run

    load_run(run, base=base, device="cpu")


def merge_into(base: Path, run: Path) -> None:
    merge(run, run.parent / "out", base=base, allow_other_base=True)


WAYS = [pytest.param(merge_into, id="merge"), pytest.param(load_into, id="load")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", WRONG_BASES)
def test_other_names_or_shapes_are_refused(
    kind: str, way: Callable[[Path, Path], None], make_tiny_llama: Make, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    other = make_tiny_llama(**WRONG_BASES[kind])
    with pytest.raises(FrugalError, match="does not fit the base") as caught:
        way(other, tmp_path / "run")
    message = str(caught.value)
    assert {"deeper": "layers.2.", "shallower": "layers.1."}.get(kind, "layers.0.") in message
    assert {"deeper": "missing", "shallower": "unexpected"}.get(kind, "shape") in message
    assert "lora_" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["IA3", "PROMPT_TUNING"])
def test_an_adapter_that_is_no_lora_is_refused_by_its_type(
    kind: str, way: Callable[[Path, Path], None], tiny_llama_folder: Path, tmp_path: Path
) -> None:
    """Other types have no `init_lora_weights`: chat and verify ended in an AttributeError."""
    make_run(tmp_path / "run", tiny_llama_folder)
    more = {
        "IA3": {"target_modules": ["k_proj"], "feedforward_modules": []},
        "PROMPT_TUNING": {"num_virtual_tokens": 2},
    }
    content = {"peft_type": kind, "task_type": "CAUSAL_LM", **more[kind]}
    (tmp_path / "run" / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(FrugalError, match=f"of type {kind}; .*PEFT itself"):
        way(tiny_llama_folder, tmp_path / "run")


@pytest.mark.parametrize("way", WAYS)
def test_a_renamed_and_an_unknown_key_are_listed(
    way: Callable[[Path, Path], None], tiny_llama_folder: Path, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    file = tmp_path / "run" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors["base_model.model.model.layers.1.attn.q_proj.lora_B.weight"] = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(FrugalError) as caught:
        way(tiny_llama_folder, tmp_path / "run")
    assert name in str(caught.value)
    assert "layers.1.attn.q_proj" in str(caught.value)
    tensors[name] = tensors.pop("base_model.model.model.layers.1.attn.q_proj.lora_B.weight")
    save_file({**tensors, "base_model.model.surprise": torch.zeros(2)}, file)
    with pytest.raises(FrugalError, match="surprise"):
        way(tiny_llama_folder, tmp_path / "run")
    save_file(tensors, file)
    way(tiny_llama_folder, tmp_path / "run")


def test_other_weights_of_the_same_shape_are_noticed(
    make_tiny_llama: Make, tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from frugal.inference.load import load_run

    make_run(tmp_path / "run", tiny_llama_folder)
    other = make_tiny_llama(seed=2)
    with pytest.raises(CheckpointError, match="other weights") as caught:
        merge(tmp_path / "run", tmp_path / "out", base=other)
    assert "--allow-other-base" in str(caught.value)
    report = merge(tmp_path / "run", tmp_path / "out", base=other, allow_other_base=True)
    assert any("other weights" in warning for warning in report.warnings)
    loaded = load_run(tmp_path / "run", base=other, device="cpu")
    assert len(loaded.warnings) == 1
    assert "other weights" in capsys.readouterr().err
    assert load_run(tmp_path / "run", base=other, device="cpu", allow_other_base=True).warnings == []
    assert load_run(tmp_path / "run", device="cpu").warnings == []


def test_the_base_that_was_named_wins(make_tiny_llama: Make, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """The stored base is gone from its place, a copy was named."""
    model = make_run(tmp_path / "run", tiny_llama_folder)
    for name, key in (("adapter_config.json", "base_model_name_or_path"),):
        content = json.loads((tmp_path / "run" / name).read_text())
        (tmp_path / "run" / name).write_text(json.dumps({**content, key: str(tmp_path / "gone")}))
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace(str(tiny_llama_folder), str(tmp_path / "gone")))
    with pytest.raises(FrugalError, match="gone"):
        merge(tmp_path / "run", tmp_path / "out")
    merge(tmp_path / "run", tmp_path / "out", base=tiny_llama_folder)
    torch.testing.assert_close(logits_here(tmp_path / "out"), logits_of(model), rtol=1e-4, atol=2e-5)
    other = make_tiny_llama(seed=3)
    report = merge(tmp_path / "run", tmp_path / "out2", base=other, allow_other_base=True)
    assert Path(report.base) == other
    saved, stock = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out2", other))
    assert torch.equal(saved["model.embed_tokens.weight"], stock["model.embed_tokens.weight"])


def test_a_pickled_adapter_is_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    (tmp_path / "run" / "adapter_model.safetensors").unlink()
    (tmp_path / "run" / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        merge(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("name", ["lora", "lora_A", "default"])
def test_the_adapters_name_does_not_matter(name: str, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """PEFT lays an adapter of another name into a folder of that name; its keys carry no name."""
    model = make_run(tmp_path / "run", tiny_llama_folder)
    named = tmp_path / name
    named.mkdir()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "run" / file).rename(named / file)
    for file in ("config.yaml", "manifest.json"):
        (named / file).write_bytes((tmp_path / "run" / file).read_bytes())
    merge(named, tmp_path / "out")
    torch.testing.assert_close(logits_here(tmp_path / "out"), logits_of(model), rtol=1e-4, atol=2e-5)
