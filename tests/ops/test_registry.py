"""What ran is what is recorded; a row decides for the run and for its plan; a new row is all that a form needs."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch import Tensor

from frugal.device import Device
from frugal.ops import Projection, attention, gated_mlp, linear_cross_entropy, lora_linear, registry, rms_norm
from frugal.ops.registry import implements, recording, resolve
from frugal.ops.rms_norm import _RmsNorm
from frugal.ops.rows import ROWS, Implementation
from frugal.ops.simulated import simulating


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RESOLVED", {})
    monkeypatch.setattr(registry, "_FORMS", dict(registry._FORMS))


def ran(record: registry.Ran) -> dict[str, str]:
    return {one.key: one.value for one in record.decisions()}


def test_what_ran_is_recorded_with_every_refusal() -> None:
    x = torch.randn(5, 64)
    with recording() as record:
        rms_norm(x, torch.ones(64), 1e-6)
        lora_linear(x, torch.randn(32, 64))
        square = Projection(torch.randn(64, 64))
        gated_mlp(x, (square, square), square)
        linear_cross_entropy(x, torch.randn(100, 64), torch.arange(5))
        q = torch.randn(1, 2, 5, 16)
        attention(q, q, q)
        attention(q, q, q, softcap=30.0)
    assert ran(record) == {
        "op rms_norm": "torch",
        "op lora_linear": "torch",
        "op gated_mlp": "torch",
        "op linear_cross_entropy": "torch",
        "op attention": "cpu_flash, blockwise",
    }
    (two,) = [one for one in record.decisions() if one.key == "op attention"]
    assert "soft cap" in two.rejected["cpu_flash"]
    with recording() as later:
        pass
    assert later.decisions() == []


def test_a_shape_that_falls_back_is_recorded_as_fallen_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def kernel(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        called.append("triton")
        return _RmsNorm.apply(x, weight, eps, offset)

    monkeypatch.setitem(registry._FORMS, ("rms_norm", "triton"), kernel)
    with recording() as record:
        rms_norm(torch.randn(2, 64), None, 1e-6, implementation="triton")
        rms_norm(torch.randn(2, 8256), None, 1e-6, implementation="triton")
    assert called == ["triton"]
    (decision,) = record.decisions()
    assert decision.value == "triton, torch"
    assert "8256 columns" in decision.rejected["triton"]

    head, labels = torch.randn(70, 64), torch.arange(5)
    with recording() as record:
        bias = torch.zeros(70)
        linear_cross_entropy(torch.randn(5, 64), head, labels, bias=bias, implementation="triton")
    (decision,) = record.decisions()
    assert decision.value == "torch"
    assert "needs logits in fp32" in decision.rejected["triton"]


def test_other_threads_count_and_fake_tensors_do_not() -> None:
    with recording() as record:
        worker = threading.Thread(target=lambda: rms_norm(torch.randn(2, 8), None, 1e-6))
        worker.start()
        worker.join()
        with simulating(Device("cuda", capability=(8, 6))):
            q = torch.empty(1, 2, 16, 64, device="meta", dtype=torch.bfloat16)
            attention(q, q, q)
    assert ran(record) == {"op rms_norm": "torch"}


def test_a_changed_row_changes_the_run_and_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted refusal: what the dispatch does not take, the forecast does not count either."""
    q = torch.empty(1, 2, 64, 64, device="meta", dtype=torch.bfloat16)

    def planned() -> str:
        monkeypatch.setattr(registry, "_RESOLVED", {})
        with simulating(Device("cuda", capability=(8, 6))):
            return resolve("attention", q, window=16, softcap=None, causal=True, head_size=64, documents=2)[1].value

    assert planned() == "triton"
    rows = tuple(
        dataclasses.replace(row, refuse=lambda facts: "planted") if row.name == "triton" else row
        for row in ROWS["attention"]
    )
    monkeypatch.setitem(ROWS, "attention", rows)
    assert planned() == "blockwise"


def test_a_new_implementation_is_one_row_and_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "rms_norm", (Implementation("toy", "the newest"), *ROWS["rms_norm"]))

    @implements("rms_norm", "toy")
    def _(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        return torch.full_like(x, 7.0)

    with recording() as record:
        assert bool((rms_norm(torch.randn(2, 3), None, 1e-6) == 7).all())
    assert ran(record) == {"op rms_norm": "toy"}
    with pytest.raises(ValueError, match="no row 'toys'"):
        implements("rms_norm", "toys")
