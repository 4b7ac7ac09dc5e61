"""docs/how-to-trl.md as it stands, over a tiny base (P08)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import frugal
from frugal.models.modules.fused import FrugalLoraLinear, FrugalRMSNorm

PAGE = Path(__file__).parents[2] / "docs" / "how-to-trl.md"


def losses(code: str) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(code, names)
    history = names["trainer"].state.log_history
    return [entry["loss"] for entry in history if "loss" in entry], names["model"]


def test_the_page_runs_and_replaced_modules_train_the_same(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    code = found[1].replace('"smollm2-135m-instruct"', repr(str(tiny_llama_folder)) + ', device="cpu"')
    code = code.replace("max_steps=3", "max_steps=3, use_cpu=True, logging_steps=1, learning_rate=1e-2, bf16=False")
    ours, model = losses(code)
    kinds = {type(module) for module in model.modules()}
    assert {FrugalLoraLinear, FrugalRMSNorm} <= kinds
    stock, model = losses(code.replace("for_training=True", "for_training=False"))
    assert not {FrugalLoraLinear, FrugalRMSNorm} & {type(module) for module in model.modules()}
    assert len(ours) == 3
    assert ours[2] < ours[0]
    assert ours == pytest.approx(stock, rel=1e-5)
    again = frugal.load("runs/trl/adapter", base=tiny_llama_folder, device="cpu", for_training=True)
    assert again.checkpointing is not None
    assert again.checkpointing.policy == "recompute"
    assert any(parameter.requires_grad for parameter in again.model.parameters())
