"""The device probe and the dtype it leads to."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from frugal.device import Device, needs_loss_scaling, probe, resolve_dtype


def test_importing_starts_no_cuda() -> None:
    code = "import torch, frugal.device; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_probe_of_this_machine() -> None:
    device = probe()
    assert device.total_bytes > 1 << 30
    assert device.torch_device.type == device.kind == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("asked", ["bfloat16", "float16", "float32"])
def test_a_cpu_does_what_it_is_told(asked: str) -> None:
    choice = resolve_dtype(asked, Device("cpu", 0, "CPU", 1 << 34, None))
    assert choice.value is getattr(torch, asked)
    assert needs_loss_scaling(choice.value) == (asked == "float16")
