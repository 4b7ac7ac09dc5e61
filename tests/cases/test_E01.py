"""E01: bf16 asked for on a GPU that has none."""

from __future__ import annotations

import pytest
import torch

from frugal.errors import UnsupportedError
from frugal.hardware import Device, resolve_dtype

T4 = Device("cuda", 0, "Tesla T4", 16 << 30, (7, 5), has_bf16=False)
A100 = Device("cuda", 0, "A100", 40 << 30, (8, 0), has_bf16=True)
CPU = Device("cpu", 0, "CPU", 16 << 30, None, has_bf16=False)


@pytest.mark.parametrize(
    ("device", "dtype", "scaling"),
    [(T4, torch.float16, True), (A100, torch.bfloat16, False), (CPU, torch.float32, False)],
)
def test_auto(device: Device, dtype: torch.dtype, scaling: bool) -> None:
    choice = resolve_dtype("auto", device)
    assert (choice.compute, choice.loss_scaling) == (dtype, scaling)
    assert choice.reason


def test_explicit_bf16_on_a_t4_stops_with_the_line_to_change() -> None:
    with pytest.raises(UnsupportedError, match=r"Tesla T4 \(compute capability 7\.5\)") as caught:
        resolve_dtype("bfloat16", T4)
    assert "model.dtype: auto" in str(caught.value)
    assert "model.dtype: float32" in str(caught.value)


def test_explicit_choices_are_kept() -> None:
    assert resolve_dtype("bfloat16", A100).compute is torch.bfloat16
    assert resolve_dtype("float16", A100).loss_scaling
    assert resolve_dtype("float32", T4).compute is torch.float32
