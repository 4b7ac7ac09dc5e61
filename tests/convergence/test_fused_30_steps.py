"""30 steps with frugal's modules, checkpointing and attention give the losses and the adapter of the stock modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frugal.files import read_json
from frugal.run.train import train
from frugal.training.log import read_log
from tests.support import runs

STEPS = 30


@pytest.mark.parametrize("packing", [False, True])
def test_stock_against_frugal(tiny_llama_folder: Path, tmp_path: Path, packing: bool) -> None:
    data = runs.write_rows(tmp_path / "rows.jsonl", 24)
    kinds: dict[str, dict[str, Any]] = {
        "stock": {"fused": False, "checkpoint": "none", "optimizer_in_backward": False},
        "frugal": {"fused": True, "checkpoint": "disk", "loss_chunk_tokens": 7, "mlp_chunk_tokens": 5},
    }
    logs, adapters = {}, {}
    for name, memory in kinds.items():
        config = runs.config(
            tiny_llama_folder,
            data,
            tmp_path / name,
            model={"base": str(tiny_llama_folder), "quantize": "nf4", "dtype": "float32"},
            lora={"lora_dropout": 0.0},
            memory=memory,
        )
        config["data"].update(packing=packing, max_length=128)
        config["train"] = {
            "max_steps": STEPS,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
        }
        train(config)
        logs[name] = read_log(tmp_path / name / "train_log.jsonl")
        adapters[name] = load_file(tmp_path / name / "adapter_model.safetensors")
        chosen = read_json(tmp_path / name / "manifest.json")["implementations"]["modules"]["chosen"]
        assert chosen == ("stock" if name == "stock" else "23 fused, 0 stock")
    assert len(logs["stock"]) == STEPS
    assert logs["stock"][-1]["loss"] < logs["stock"][0]["loss"] - 0.3  # something was learned
    for ours, stock in zip(logs["frugal"], logs["stock"], strict=True):
        assert ours["rows_sha256"] == stock["rows_sha256"]
        assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5), ours["step"]
    assert adapters["frugal"].keys() == adapters["stock"].keys()
    for key, stock_tensor in adapters["stock"].items():
        torch.testing.assert_close(adapters["frugal"][key], stock_tensor, rtol=1e-3, atol=1e-4, msg=key)
