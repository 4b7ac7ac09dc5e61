"""N10: adapter dtype policy: what is trained is float32, on every path and whatever the base's dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel

from frugal.adapters import adapter_state, apply_adapters, load_adapter, masters_float32, save_adapter
from frugal.config import LoraSection
from frugal.models.load import load_base
from frugal.models.resolve import resolve_base

IDS = torch.randint(3, 300, (1, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def folder(request: pytest.FixtureRequest, make_tiny_llama: Callable[..., Path]) -> Path:
    return make_tiny_llama(dtype=request.param)


def dtypes(model: PeftModel) -> set[torch.dtype]:
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    return trained | {value.dtype for value in adapter_state(model).values()}


@pytest.mark.parametrize("quantize", ["nf4", "none"])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_every_path_gives_float32(
    folder: Path, tmp_path: Path, quantize: Literal["nf4", "none"], settings: dict[str, Any]
) -> None:
    def base() -> Any:
        return load_base(resolve_base(str(folder)), quantize=quantize, dtype=torch.bfloat16).model

    lora = LoraSection(r=4, **settings)
    created = apply_adapters(base(), lora, seed=0, quantize=quantize).model
    assert dtypes(created) == {torch.float32}
    save_adapter(created, tmp_path)
    loaded = load_adapter(base(), tmp_path)
    assert dtypes(loaded) == {torch.float32}
    resumed = load_adapter(base(), tmp_path, trainable=True)
    assert dtypes(resumed) == {torch.float32}
    saved = adapter_state(created)
    for key, value in adapter_state(resumed).items():
        assert torch.equal(value, saved[key])  # never rounded to the base's 16 bits on the way
    created.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    masters_float32(created)
    second = adapter_state(created, "second")
    assert second
    assert {value.dtype for value in second.values()} == {torch.float32}


def test_three_steps_and_the_optimizer_state(folder: Path) -> None:
    base = load_base(resolve_base(str(folder)), dtype=torch.bfloat16).model
    model = apply_adapters(base, LoraSection(r=4), seed=0).model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert {p.grad.dtype for p in trained if p.grad is not None} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[2] < losses[0]
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert {t.dtype for t in tensors} == {torch.float32}


def test_the_scaler_never_meets_half_gradients(make_tiny_llama: Callable[..., Path]) -> None:
    """float16 compute with loss scaling: unscaling works, because masters and their gradients are float32."""
    base = load_base(resolve_base(str(make_tiny_llama(dtype=torch.float16))), dtype=torch.float16).model
    model = apply_adapters(base, LoraSection(r=4), seed=0).model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(input_ids=IDS, labels=IDS).loss.float()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad)
