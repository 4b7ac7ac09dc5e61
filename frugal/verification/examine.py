"""Facts, choices and checks of one machine put together, and shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from frugal.decision import Decision
from frugal.device import Device, needs_loss_scaling, no_kernels, probe, resolve_dtype, unseen_gpu
from frugal.manifest import versions
from frugal.ops.registry import choices
from frugal.ops.rows import COMPILED_FOR, no_tensor_cores, no_triton
from frugal.units import gib
from frugal.verification.judge import Check, Subject
from frugal.verification.kernel_checks import KERNELS
from frugal.verification.registry import run_checks

_SHOWN_VERSIONS = ("frugal", "torch", "transformers", "peft", "bitsandbytes", "triton", "python")


@dataclass(frozen=True)
class Diagnosis:
    """What `frugal doctor` found out."""

    device: Device
    dtype: Decision[torch.dtype]
    versions: dict[str, str]
    choices: list[Decision[str]]
    checks: list[Check]
    kernels: dict[str, str]
    """What is known of each Triton kernel on this device, and how."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check that was run is right."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        compute = str(self.dtype.value).removeprefix("torch.")
        return {
            "device": {**self.device.to_json(), "target": self.device.label, "mig": self.device.mig},
            "dtype": {
                "compute": compute,
                "loss_scaling": needs_loss_scaling(self.dtype.value),
                "reason": self.dtype.reason,
            },
            "versions": self.versions,
            "choices": [
                {"op": one.key, "implementation": one.value, "reason": one.reason, "rejected": dict(one.rejected)}
                for one in self.choices
            ],
            "checks": [check.to_json() for check in self.checks],
            "kernels": self.kernels,
            "notes": self.notes,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
        }


def examine() -> Diagnosis:
    """Look at the device that a run here would use, and run the checks on it: seconds on a CPU, under a minute on GPUs
    (kernels are compiled on first use)."""
    start = time.perf_counter()
    device = probe()
    dtype = resolve_dtype("auto", device)
    checks = list(run_checks(Subject(device.torch_device, dtype.value)))
    return Diagnosis(
        device,
        dtype,
        versions(),
        choices(device, dtype.value),
        checks,
        evidence(device, dtype.value, checks),
        notes(device),
        time.perf_counter() - start,
    )


def evidence(device: Device, dtype: torch.dtype, checks: list[Check]) -> dict[str, str]:
    """For each Triton kernel, how far it was tried on ``device``. What nobody ran is not called run."""
    ran: dict[str, bool] = {}
    for check in checks:
        if check.implementation == "triton":
            name = check.op.removeprefix("kernels.")
            ran[name] = ran.get(name, True) and check.passed
    found = {}
    for name in KERNELS:
        reason = no_triton(device, dtype)
        if reason is None and name == "attention":
            reason = no_tensor_cores(device)
        compiled = COMPILED_FOR if name != "attention" else COMPILED_FOR[1:]
        if name in ran:
            found[name] = "run on this GPU: right" if ran[name] else "run on this GPU: WRONG"
        elif reason is None and device.label in compiled:
            found[name] = f"checked in the interpreter, compiles for {device.label}, not run on this GPU"
        else:
            why = reason or f"nobody compiled it for {device.label}: look at the checks before you trust it"
            span = f"{compiled[0]} to {compiled[-1]}"
            found[name] = f"checked in the interpreter, compiles for {span}; not used here: {why}"
    return found


def notes(device: Device) -> list[str]:
    """What a user should know about this device."""
    found = []
    reason = no_kernels(device) if device.kind == "cuda" else unseen_gpu()
    if reason is not None:
        found.append(reason)
    if device.amd:
        found.append("ROCm is not supported: no kernel of frugal ever ran on an AMD GPU. The torch forms are used.")
    if device.mig:
        found.append(
            "This is a slice of a GPU (MIG). Kernels run as on the whole one; several processes over slices of one GPU "
            "are not supported: NCCL cannot connect them."
        )
    if device.kind == "cuda" and torch.cuda.device_count() > 1:
        found.append(f"{torch.cuda.device_count()} GPUs: only number {torch.cuda.current_device()} was looked at.")
    return found


def render(found: Diagnosis) -> Group:
    """The diagnosis as it is printed; made for 80 columns and more."""
    return Group(*_parts(found))


def _parts(found: Diagnosis) -> Iterator[Any]:
    device = found.device
    yield Text(f"{device.name} ({device.label}), {gib(device.total_bytes)}", style="bold")
    yield Text(f"computes in {str(found.dtype.value).removeprefix('torch.')}: {found.dtype.reason}")
    yield Text(", ".join(f"{name} {found.versions[name]}" for name in _SHOWN_VERSIONS if name in found.versions))
    for note in found.notes:
        yield Text(f"note: {note}", style="yellow")
    yield Text()
    chosen = Table(title="What each operation uses here", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    chosen.add_column("operation", no_wrap=True)
    chosen.add_column("uses", no_wrap=True)
    chosen.add_column("why, and why not the others", overflow="fold")
    for choice in found.choices:
        # That a row is for other kinds of device is plain; it stays in the JSON.
        others = "".join(
            f"\nnot {name}: {why}" for name, why in choice.rejected.items() if not why.startswith("device ")
        )
        chosen.add_row(choice.key, choice.value, Text(choice.reason).append(others, style="dim"))
    yield chosen
    checks = Table(title="Values, forward and gradients, against float64", box=box.SIMPLE_HEAD, title_justify="left",
                   pad_edge=False)  # fmt: skip
    for name in ("operation", "as", "what"):
        checks.add_column(name, no_wrap=True)
    checks.add_column("error*", justify="right", no_wrap=True)
    checks.add_column("result", overflow="fold")
    for check in found.checks:
        error = "" if check.error is None else ("0" if check.error == 0 else f"{check.error:.2f}")
        result = Text("right", style="green") if check.passed else Text(f"WRONG {check.message}", style="bold red")
        checks.add_row(check.op, check.implementation, check.what, error, result)
    yield checks
    where = found.checks[0].where if found.checks else ""
    yield Text(f"* largest error as a part of the allowed one; all of these were {where}.", style="dim")
    yield Text()
    yield Text("Triton kernels", style="italic")
    for text in dict.fromkeys(found.kernels.values()):
        names = ", ".join(name for name, value in found.kernels.items() if value == text)
        yield Text(f" {names}:").append(f" {text}", style="dim")
    yield Text()
    wrong = sum(not check.passed for check in found.checks)
    total = len(found.checks)
    if wrong:
        yield Text(
            f"{wrong} of {total} checks are WRONG: do not train here before that is understood.", style="bold red"
        )
    else:
        yield Text(f"{total} of {total} checks are right ({found.seconds:.0f} s).", style="bold green")


def doctor(console: Console) -> Diagnosis:
    """`examine`, printed on ``console``."""
    found = examine()
    console.print(render(found))
    return found
