"""`memory.attention`: the name reaches the operation, or the run stops with the reason before anything is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from frugal.errors import UnsupportedError
from frugal.models import attention as module
from frugal.models.attention import use_attention
from frugal.run.train import train


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
@pytest.mark.parametrize("named", ["triton", "flash_attn"])
def test_a_name_that_the_device_cannot_run_stops_before_anything_is_fetched(named: str, tmp_path: Path) -> None:
    config = {
        "model": {"base": "nobody/no-such-model"},
        "data": {"train": str(tmp_path / "missing.jsonl")},
        "memory": {"attention": named},
        "output": {"dir": str(tmp_path / "run")},
    }
    with pytest.raises(UnsupportedError, match=f"{named} was asked for but cannot run here: device cpu"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_the_name_reaches_the_operation(tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    true = module.attention

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        asked.append(options.get("implementation"))
        return true(*args, **options)

    monkeypatch.setattr(module, "attention", spy)
    model = load(tiny_llama_folder)
    ids = torch.arange(5, 25)[None]
    want = model(ids).logits
    choice = use_attention(model, "sdpa")
    assert choice.value == "frugal"
    assert choice.by_layer["full"].value == "sdpa"
    assert "asked for by name" in choice.by_layer["full"].reason
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
    assert set(asked) == {"sdpa"}
    asked.clear()
    other = load(tiny_llama_folder)
    assert use_attention(other).by_layer["full"].value == "cpu_flash"
    other(ids)
    assert set(asked) == {None}


def gemma2() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, sliding_window=4, attn_logit_softcapping=20.0,
            attn_implementation="eager",
        )
    ).eval()  # fmt: skip


def test_both_kinds_of_layers_are_written_down() -> None:
    choice = use_attention(gemma2())
    assert choice.value == "frugal"
    assert set(choice.by_layer) == {"full", "sliding"}
    assert choice.by_layer["full"].value == "blockwise"
    assert "soft cap" in choice.by_layer["full"].rejected["cpu_flash"]


def test_a_name_that_the_model_cannot_have_is_an_error() -> None:
    with pytest.raises(
        UnsupportedError, match=r"sdpa was asked for but cannot run here: .* no soft cap\. Here blockwise"
    ):
        use_attention(gemma2(), "sdpa")


def test_a_model_that_keeps_its_own_attention(tiny_llama_folder: Path) -> None:
    model = load(tiny_llama_folder)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    assert use_attention(model).value == "sdpa"
    with pytest.raises(UnsupportedError, match=r"memory\.attention: sdpa was asked for, but this model keeps"):
        use_attention(model, "sdpa")
