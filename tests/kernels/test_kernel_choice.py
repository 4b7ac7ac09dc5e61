"""Who gets a Triton kernel: NVIDIA GPUs from 7.5 on, in dtypes they compute in; never a CPU or a fake tensor."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from frugal.device import Device
from frugal.errors import UnsupportedError
from frugal.ops import (
    adam8bit,  # noqa: F401  (registers its rows)
    registry,
)
from frugal.ops.registry import choices, choose, resolve
from frugal.ops.simulated import simulating

OPS = ["linear_cross_entropy", "gated_mlp", "rms_norm", "rope", "nf4_rows", "adam8bit"]
T4, A10 = Device("cuda", capability=(7, 5)), Device("cuda", capability=(8, 6))

pytest.importorskip("triton")


@pytest.mark.parametrize("op", OPS)
def test_by_device(op: str) -> None:
    plain = "bitsandbytes" if op == "adam8bit" else "torch"
    assert choose(op, "cpu").value == plain
    assert choose(op, A10, torch.bfloat16).value == "triton"
    assert choose(op, T4, torch.float16).value == "triton"
    emulated = choose(op, T4, torch.bfloat16)
    assert emulated.value == plain
    assert "only emulated" in emulated.rejected["triton"]
    if op != "adam8bit":
        assert "float64" in choose(op, A10, torch.float64).rejected["triton"]
    assert "ROCm" in choose(op, Device("cuda", amd=True), torch.bfloat16).rejected["triton"]
    with pytest.raises(UnsupportedError, match="triton was asked for"):
        choose(op, "cpu", named="triton")


def test_optimizer_steps_are_chosen_for_float32_parameters() -> None:
    """A run that computes in emulated bfloat16 on a T4 still has float32 adapters."""
    by_op = {choice.key: choice for choice in choices(T4, torch.bfloat16)}
    assert by_op["rms_norm"].value == "torch"
    assert by_op["adam8bit"].value == "triton"
    with pytest.raises(UnsupportedError, match="float64"):
        choose("adam8bit", "cpu", torch.float64)


def test_neither_cpu_nor_fake_tensors_take_a_kernel() -> None:
    for op in OPS:
        form, decision = resolve(op, torch.zeros(2, 2))
        assert decision.value in ("torch", "bitsandbytes")
        with FakeTensorMode():
            assert resolve(op, torch.zeros(2, 2))[0] is form


def test_a_plan_for_a_gpu_resolves_through_the_same_rows_and_never_calls_a_kernel() -> None:
    for op in OPS:
        plain = resolve(op, torch.zeros(2, 2))[0]
        with simulating(Device("cuda", capability=(8, 6))):
            form, decision = resolve(op, torch.empty(2, 2, device="meta", dtype=torch.float32))
        assert decision.value == "triton"
        assert form is registry._SIMULATED.get((op, "triton"), plain)


def test_without_triton_everything_imports_and_says_why() -> None:
    """In a process where Triton cannot be found."""
    code = """
import sys, importlib.util
import torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(name)
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
sys.meta_path.insert(0, Hidden())
assert "triton" not in sys.modules
import frugal.ops
from frugal.ops.registry import choose
from frugal.device import Device
choice = choose("rms_norm", Device("cuda", capability=(8, 6)), torch.bfloat16)
assert choice.value == "torch" and "triton is not installed" in choice.rejected["triton"], choice
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
