"""F19: bases that are, or only say that they are, quantised: one message from what the tensors are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import frugal
from frugal.cli.early import before_training
from frugal.config import load_config
from frugal.errors import UnsupportedError
from frugal.models.quantised_base import said_method
from frugal.models.resolve import resolve_base
from frugal.planning.source import configuration_folder

Q = "model.layers.0.self_attn.q_proj"


def packed(*names: str, dtype: torch.dtype = torch.uint8) -> Callable[[dict[str, Any]], None]:
    """Replaces a weight by tensors under a method's names."""

    def change(tensors: dict[str, Any]) -> None:
        del tensors[f"{Q}.weight"]
        for name in names:
            tensors[f"{Q}.{name}"] = torch.zeros((8, 4)).to(dtype)

    return change


BNB = ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4")
CASES: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], None] | None, str]] = {
    "stale bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        None,
        r"\(bitsandbytes 4-bit\), but the weights are F32, not quantised: the entry is stale. Remove",
    ),
    "stale in a part": (
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
        None,
        r"\(gptq\), but the weights are F32",
    ),
    "stale mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, None, r"\(MXFP4\), but the weights are F32"),
    "unsaid bitsandbytes": ({}, packed(*BNB), "tensors are bitsandbytes 4-bit, though config.json does not say so"),
    "GPTQ": ({}, packed("qweight", "qzeros", "scales", "g_idx", dtype=torch.int32), "tensors are GPTQ, though"),
    "AWQ": (
        {"quantization_config": {"quant_method": "awq"}},
        packed("qweight", "qzeros", "scales", dtype=torch.int32),
        "tensors are GPTQ or AWQ. ",
    ),
    "MXFP4": ({}, packed("proj_blocks", "proj_scales"), r"MXFP4.*Mxfp4Config\(dequantize=True\)"),
    "FP8": ({}, packed("weight", "weight_scale_inv", dtype=torch.float8_e4m3fn), "tensors are FP8"),
    "something packed": ({}, packed("weight"), r"packed integers \(U8\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_message_by_what_the_tensors_are(name: str, tiny_llama_folder: Path, tmp_path: Path) -> None:
    """Before rows are read, and the same from train, plan and everything that opens a base."""
    changes, change, message = CASES[name]
    base = tmp_path / "base"
    shutil.copytree(tiny_llama_folder, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes}))
    if change is not None:
        tensors = load_file(base / "model.safetensors")
        change(tensors)
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    asked = load_config({"model": {"base": str(base)}, "data": {"train": "no.jsonl"}, "output": {"dir": str(tmp_path)}})
    told = set()
    for opened in (
        lambda: before_training(asked, None),
        lambda: resolve_base(str(base)),
        lambda: configuration_folder(str(base)),
        lambda: frugal.load(str(base)),
        lambda: frugal.preview(asked),
    ):
        with pytest.raises(UnsupportedError, match=message) as caught:
            opened()
        told.add(str(caught.value))
    assert len(told) == 1
    assert caught.value.exit_code == 2


def test_what_is_not_quantised_passes(tiny_llama_folder: Path) -> None:
    assert resolve_base(str(tiny_llama_folder)).kind == "folder"
    assert said_method({"a": {"b": 1}, "quantization_config": None}) is None
