"""`frugal doctor`: right values here, wrong values found, honest labels, a table that fits a terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import Tensor

from frugal.decision import Decision
from frugal.device import Device
from frugal.ops.registry import choices
from frugal.verification import Check, Diagnosis, Subject, examine, judge, operations, run_checks
from frugal.verification.examine import evidence, notes, render

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return examine()


def shown(diagnosis: Diagnosis, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(diagnosis))
    return out.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_on_a_cpu(found: Diagnosis) -> None:
    assert found.passed
    assert found.seconds < 60
    ran = {(check.op, check.implementation) for check in found.checks}
    assert {("attention", "cpu_flash"), ("attention", "blockwise"), ("attention", "sdpa")} <= ran
    assert {op for op, _ in ran} >= {"rms_norm", "rope", "gated_mlp", "lora_linear", "nf4",
                                     "linear_cross_entropy"}  # fmt: skip
    assert all(check.where == "run on this CPU" for check in found.checks)
    for text in found.kernels.values():
        assert text.startswith("checked in the interpreter, compiles for sm_")
        assert "not used here: Triton kernels run on NVIDIA GPUs, this device is cpu" in text
    assert "compiles for sm_80 to" in found.kernels["attention"]
    assert "run on this GPU" not in shown(found, 100)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(found: Diagnosis, width: int) -> None:
    text = shown(found, width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("attention", "cpu_flash", "linear_cross_entropy", "right", "Triton kernels"):
        assert word in text
    assert "…" not in text, "nothing is cut off"


def test_json_is_the_same_and_plain(found: Diagnosis) -> None:
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["passed"] is found.passed
    assert len(plain["checks"]) == len(found.checks)
    assert {choice["op"] for choice in plain["choices"]} >= {"matrix products", "attention", "rope"}
    assert plain["versions"]["torch"] == torch.__version__
    assert plain["device"]["target"] == found.device.label


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_wrong_values_and_failures_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true_norm = operations.rms_norm
    monkeypatch.setattr(operations, "rms_norm", lambda x, w, eps: true_norm(x, w, 1e-3))
    monkeypatch.setattr(operations, "rope_pair", lambda *args: (_ for _ in ()).throw(RuntimeError("boom\nmore")))
    bad = {check.op: check for check in run_checks(Subject(CPU, torch.float32)) if not check.passed}
    assert set(bad) == {"rms_norm", "rope"}
    assert bad["rms_norm"].error is not None
    assert bad["rms_norm"].error > 1
    assert (bad["rope"].error, bad["rope"].message) == (None, "RuntimeError: boom")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_machine_is_right_whatever_is_drawn(dtype: torch.dtype, seed: int) -> None:
    subject = Subject(CPU, dtype, generator=torch.Generator().manual_seed(seed))
    errors = {f"{c.op} {c.implementation} {c.what}": c.error for c in run_checks(subject)}
    assert all(error is not None and error < 0.9 for error in errors.values()), errors


def as_if(x: Tensor, value: Tensor) -> Tensor:
    """``value``, with the gradient that ``x`` gets."""
    return x + (value - x).detach()


def one_value_wrong(x: Tensor) -> Tensor:
    wrong = x.detach().clone(memory_format=torch.contiguous_format)
    wrong.view(-1)[wrong.numel() // 3] += x.detach().abs().mean() * (1 if x.dtype == torch.bfloat16 else 1e-3)
    return as_if(x, wrong)


def fewer_bits(x: Tensor) -> Tensor:
    """float32 as tensor cores round it to TF32; bfloat16 to four bits."""
    mantissa, exponent = torch.frexp(x.detach().float())
    steps = 2.0 ** (11 if x.dtype == torch.float32 else 4)
    return as_if(x, torch.ldexp((mantissa * steps).round() / steps, exponent).to(x.dtype))


def steeper(x: Tensor) -> Tensor:
    """The same value, with a gradient that is 3 % too large."""
    return x + (x - x.detach()) * 0.03


def nan_gradient(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * torch.nan)
    return x


FAULTS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "a wrong value": lambda true: lambda *a, **o: one_value_wrong(true(*a, **o)),
    "fewer bits": lambda true: lambda x, *a, **o: true(fewer_bits(x), *a, **o),
    "a wrong gradient": lambda true: lambda x, *a, **o: true(steeper(x), *a, **o),
    "a gradient that is no number": lambda true: lambda x, *a, **o: true(nan_gradient(x * 1), *a, **o),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_always_found(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("attention", "rms_norm", "gated_mlp", "lora_linear", "linear_cross_entropy")
    for name in names:
        monkeypatch.setattr(operations, name, FAULTS[fault](getattr(operations, name)))
    found = [check for check in run_checks(Subject(CPU, dtype)) if check.op in names]
    assert {check.op for check in found} == set(names)
    assert not any(check.message for check in found), "each runs"
    missed = {f"{check.op} {check.implementation} {check.what}": check.error for check in found if check.passed}
    assert not missed


def test_nan_and_other_shapes_are_wrong() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    assert judge.share_of_allowed(torch.ones(3), exact, torch.ones(3)) == 0
    assert judge.share_of_allowed(torch.tensor([1.0, torch.nan, 1.0]), exact, torch.ones(3)) == float("inf")
    assert judge.share_of_allowed(torch.ones(2), exact, torch.ones(3)) == float("inf")
    assert judge.share_of_allowed(torch.ones(3), exact * torch.nan, torch.ones(3)) == float("inf")
    assert judge.share_of_allowed(torch.ones(3), exact, torch.full((3,), torch.inf)) == float("inf")
    assert judge.share_of_allowed(torch.full((3,), 1.1), exact, torch.ones(3)) > 1
    assert judge.share_of_allowed(torch.full((3,), 1.1), exact, torch.full((3,), 0.9)) < 1


def labels(target: Device, dtype: torch.dtype, ran: dict[str, bool]) -> dict[str, str]:
    made = [Check(op, "triton", "", passed, 0.1, 0.0, "run on this GPU") for op, passed in ran.items()]
    return evidence(target, dtype, made)


def test_labels_say_no_more_than_what_was_done() -> None:
    ampere = Device("cuda", capability=(8, 6), name="NVIDIA GeForce RTX 3060")
    found = labels(ampere, torch.bfloat16, {"kernels.rope": True, "kernels.gated": False, "attention": True})
    assert found["rope"] == found["attention"] == "run on this GPU: right"
    assert found["gated"] == "run on this GPU: WRONG"
    assert found["adam8bit"] == "checked in the interpreter, compiles for sm_86, not run on this GPU"
    t4 = labels(Device("cuda", capability=(7, 5), name="Tesla T4"), torch.float16, {})
    assert "compiles for sm_75" in t4["rope"]
    assert "not used here: sm_75 has no tensor-core path" in t4["attention"]
    other = labels(Device("cuda", capability=(12, 1)), torch.bfloat16, {})
    assert "nobody compiled it for sm_121" in other["rope"]


def test_one_wrong_of_several_is_wrong() -> None:
    made = [Check("attention", "triton", what, what != "window", 0.1, 0.0, "run on this GPU")
            for what in ("plain", "window", "cap")]  # fmt: skip
    found = evidence(Device("cuda", capability=(8, 6)), torch.bfloat16, made)
    assert found["attention"] == "run on this GPU: WRONG"


def test_a_gpu_of_which_something_is_wrong(found: Diagnosis) -> None:
    device = Device("cuda", 0, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * 2**30, (8, 0))
    wrong = Check("kernels.rope", "triton", "q and k in place", False, None, 0.1, "run on this GPU", "RuntimeError: x")
    diagnosis = Diagnosis(device, Decision("model.dtype", torch.bfloat16, "it has bfloat16"), found.versions,
                          choices(device, torch.bfloat16), [wrong], evidence(device, torch.bfloat16, [wrong]),
                          notes(device), 3.0)  # fmt: skip
    text = shown(diagnosis, 80)
    assert not diagnosis.passed
    assert "sm_80" in text
    assert "1 of 1 checks are WRONG" in text
    assert "not supported: NCCL" in " ".join(text.split())
    assert "run on this GPU: WRONG" in " ".join(text.split())


def test_rocm_is_not_supported() -> None:
    amd = Device("cuda", amd=True, name="AMD Radeon RX 7900 XTX")
    assert any("ROCm is not supported" in note for note in notes(amd))


def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frugal", "doctor", "--json"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    found = examine()
    assert found.passed, [check for check in found.checks if not check.passed]
    assert found.seconds < 60
    assert all(check.where == "run on this GPU" for check in found.checks)
