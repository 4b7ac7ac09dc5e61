"""The checks of `frugal doctor` that only a GPU runs: here interpreted, right kernels pass and wrong ones do not."""

from __future__ import annotations

import pytest
import torch

from frugal.verification import Subject, kernel_checks, run_checks
from tests.kernels.support import checked

CPU = torch.device("cpu")


def run(dtype: torch.dtype) -> dict[str, tuple[bool, str]]:
    with checked():
        found = list(run_checks(Subject(CPU, dtype), ["kernels"]))
    return {check.op: (check.passed, check.message) for check in found}


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "no_triton", lambda target, dtype: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_right_kernels_pass(dtype: torch.dtype) -> None:
    found = run(dtype)
    assert set(found) == {f"kernels.{n}" for n in ("nf4", "rms_norm", "rope", "gated", "cross_entropy")}
    assert all(passed for passed, _ in found.values()), found


def test_the_check_of_the_adam_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from frugal.ops import registry
    from frugal.ops.adam8bit.triton import adam8bit_
    from frugal.verification.operations import adam_error

    def error() -> float:
        generator = torch.Generator().manual_seed(0)
        with checked():
            return adam_error(lambda *shape: torch.randn(*shape, generator=generator), "triton")

    assert error() < 0.7
    for wrong in ({"step": 1}, {"weight_decay": 0.0}):
        monkeypatch.setattr(registry, "_RESOLVED", {})
        form = lambda *tensors, wrong=wrong, **o: adam8bit_(*tensors, **{**o, **wrong})  # noqa: E731
        monkeypatch.setitem(registry._FORMS, ("adam8bit", "triton"), form)
        assert error() > 1


def test_wrong_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from frugal.ops.gated_mlp import triton as gated
    from frugal.ops.linear_cross_entropy import triton as cross_entropy
    from frugal.ops.rope import triton as rope

    true_gated, true_rope = gated.gated, rope.rope_
    monkeypatch.setattr(gated, "gated", lambda g, u, out: true_gated(g, u, out).mul_(1.01))
    monkeypatch.setattr(rope, "rope_", lambda q, k, cos, sin: true_rope(q, k, cos, -sin))

    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(cross_entropy, "cross_entropy_", fails)
    found = run(torch.float32)
    assert not found["kernels.gated"][0]
    assert not found["kernels.rope"][0]
    assert found["kernels.cross_entropy"] == (False, "RuntimeError: no kernel image is available")
    assert found["kernels.rms_norm"][0]
