"""The floor of benchmarks/peer_step.py: from products that every CPU computes well, and left out where it is none."""

from __future__ import annotations

from typing import Any

import peer_step
import pytest
import torch


def test_no_thin_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    true, thinnest = torch.mm, []

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        thinnest.append(min(*a.shape, *b.shape))
        return true(a, b)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(peer_step, "VOCAB", 1024)
    wall, cpu = peer_step.floor_seconds(256, repeats=1)
    assert min(thinnest) == peer_step.KV
    assert wall > 0
    assert cpu > 0


def test_adapters_are_counted_at_the_rate_of_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second for each multiplication of a token: two of W, three of A and three of B."""
    monkeypatch.setattr(peer_step, "_linear_seconds", lambda tokens, i, o, repeats: (2.0 * i * o, 4.0 * i * o))
    wall, cpu = peer_step.floor_seconds(1)
    layers = sum(2 * i * o + 3 * peer_step.RANK * (i + o) for i, o in peer_step.LINEARS)
    assert wall == pytest.approx(peer_step.LAYERS * layers + 2 * peer_step.HIDDEN * peer_step.VOCAB)
    assert cpu == pytest.approx(2 * wall)


@pytest.mark.parametrize(("floor", "kept"), [(2.0, True), (32.9, False)])
def test_a_floor_above_the_step_is_none(floor: float, kept: bool, capsys: pytest.CaptureFixture[str]) -> None:
    side = {"seconds": 8.0, "cpu_seconds": 8.0}
    row: dict[str, Any] = {"frugal": side, "peer": side, "floor_seconds": floor, "floor_cpu_seconds": floor}
    found = peer_step.floor_ratios(row)
    assert found == (dict.fromkeys(("floor_ratio", "peer_floor_ratio", "cpu_floor_ratio"), 4.0) if kept else {})
    assert ("left out" in capsys.readouterr().out) is not kept
