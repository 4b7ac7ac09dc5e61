"""Triton is tried by one launch before a base is loaded; what it raises becomes a reason and torch forms (B2)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from frugal.device import Device
from frugal.models.replacement import replace_modules
from frugal.ops import rows
from frugal.ops.registry import choose
from frugal.run.setup import _without_kernels
from tests.conftest import make_llama

first_launch = pytest.importorskip("frugal.ops.first_launch")
A10 = Device("cuda", capability=(8, 6))


@pytest.fixture(autouse=True)
def a_gpu_is_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows.launch_refusal.cache_clear()
    yield
    rows.launch_refusal.cache_clear()


def without_compiler(index: int) -> None:
    """What a launch does first: look for a compiler."""
    from triton.runtime.build import _find_compiler

    _find_compiler("c")


def test_without_a_c_compiler_operations_take_torch_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    tries: list[int] = []
    monkeypatch.setattr(first_launch, "launch_once", lambda index: tries.append(index) or without_compiler(index))
    for op in ("rms_norm", "rope", "gated_mlp", "linear_cross_entropy", "nf4_rows"):
        choice = choose(op, A10, torch.bfloat16)
        assert choice.value == "torch"
        assert "C compiler" in choice.rejected["triton"]
        assert "apt install gcc python3-dev" in choice.rejected["triton"]
    assert choose("attention", A10, torch.bfloat16, head_size=64, documents=2).value != "triton"
    note = _without_kernels(A10)
    assert note is not None
    assert note.startswith("warning: operations take their torch forms")
    assert tries == [0], "tried once a process"


@pytest.mark.parametrize(
    ("error", "way"),
    [
        (PermissionError(13, "Permission denied: '/root/.triton/cache'"), "TRITON_CACHE_DIR"),
        (OSError(28, "No space left on device"), "TRITON_CACHE_DIR"),
        (RuntimeError("/usr/bin/gcc failed:\nfatal error: Python.h: No such file or directory"), "python3-dev"),
        (AssertionError("libcuda.so cannot found!"), "TRITON_LIBCUDA_PATH"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "frugal doctor"),
        (ImportError("cannot import name 'driver' from 'triton.runtime'"), "frugal doctor"),
    ],
)
def test_whatever_a_launch_raises_is_a_reason(error: Exception, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(index: int) -> None:
        raise error

    monkeypatch.setattr(first_launch, "launch_once", fails)
    why = choose("rms_norm", A10, torch.bfloat16).rejected["triton"]
    assert why.startswith("no Triton kernel can be launched here: ")
    assert way in why
    assert "\n" not in why


def test_where_a_launch_works_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_launch, "launch_once", lambda index: None)
    assert choose("rms_norm", A10, torch.bfloat16).value == "triton"
    assert _without_kernels(A10) is None


def test_a_gpu_that_is_only_planned_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_launch, "launch_once", lambda index: pytest.fail("launched"))
    assert choose("rms_norm", Device("cuda", capability=(8, 6), here=False), torch.bfloat16).value == "triton"


def test_replacements_that_all_raise_alike_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that raises does not end the load, and one reason for everything is not silent."""

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("device kernel image is invalid")

    for name in ("fused.rms_norm", "fused.gated_mlp", "attention.rope_pair"):
        monkeypatch.setattr(f"frugal.models.modules.{name}", fails)
    report = replace_modules(make_llama(), compute_dtype=torch.float32)
    assert {row.was for row in report.kept} == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}
    assert report.common_failure() == "device kernel image is invalid"


def test_replacements_that_differ_are_no_common_failure() -> None:
    assert replace_modules(make_llama(), compute_dtype=torch.float32).common_failure() is None
