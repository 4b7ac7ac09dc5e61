"""A GPU that torch cannot use is refused before any download, with the way out; never a silent CPU run (B3)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import frugal.device
from frugal.config import load_config
from frugal.device import Device, no_kernels, unseen_gpu, usable
from frugal.errors import UnsupportedError
from frugal.inference.load import load_bare
from frugal.planning.inputs import planned_device
from frugal.run.setup import open_machine

ANSWER = "NVIDIA GeForce RTX 3090, 535.104.05\nNVIDIA GeForce RTX 3090, 535.104.05\n"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``driver(answer, code)``: what nvidia-smi prints, on a machine whose torch sees no GPU."""

    def put(answer: str, code: int = 0, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(frugal.device.shutil, "which", lambda name: f"/usr/bin/{name}")
        done = subprocess.CompletedProcess([], code, answer, "")
        monkeypatch.setattr(frugal.device.subprocess, "run", lambda *a, **k: done)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    return put


@pytest.mark.parametrize(
    ("answer", "cuda", "told"),
    [
        (ANSWER, "13.0", ["RTX 3090, driver 535.104.05", "needs driver 580 or later", "torch built for CUDA 12"]),
        (ANSWER.replace("535.104.05", "470.82"), "12.8", ["needs driver 525 or later", "torch built for CUDA 11"]),
        (ANSWER.replace("535.104.05", "390.1"), "12.8", ["Update the driver. To use the CPU"]),
        (ANSWER, None, ["build without CUDA", "Install torch for CUDA"]),
        (ANSWER.replace("535.104.05", "580.65"), "13.0", ["cannot start CUDA on it", "docker run --gpus all"]),
    ],
)
def test_an_unseen_gpu_is_refused_by_every_command(
    answer: str, cuda: str | None, told: list[str], driver: Any, tmp_path: Path
) -> None:
    driver(answer, cuda=cuda)
    message = unseen_gpu() or ""
    for part in [*told, "CUDA_VISIBLE_DEVICES="]:
        assert part in message
    tree = {"model": {"base": "x"}, "data": {"train": "rows.jsonl"}, "output": {"dir": str(tmp_path / "run")}}
    for command in (
        lambda: open_machine(load_config(tree)),
        lambda: planned_device("auto", gpu=None, vram=None, host_ram=None),
        lambda: load_bare("a/base-that-would-be-downloaded"),
    ):
        with pytest.raises(UnsupportedError, match="This machine has an NVIDIA GPU"):
            command()
    assert planned_device("auto", gpu="RTX 3090", vram=None, host_ram=None).kind == "cuda", "a named GPU is planned"


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1"), ("ACCELERATE_USE_CPU", "true")]
)
def test_the_cpu_when_it_is_asked_for(name: str, value: str, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(ANSWER)
    monkeypatch.setenv(name, value)
    assert usable().kind == "cpu"


def test_a_driver_without_a_gpu_is_no_gpu(driver: Any) -> None:
    driver("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", code=9)
    assert unseen_gpu() is None
    driver("No devices were found\n")
    assert unseen_gpu() is None


BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100a", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 5), True), ((8, 6), True), ((8, 9), True), ((9, 0), True), ((12, 1), True), ((10, 0), True),
     ((6, 0), False), ((7, 0), False), ((10, 3), False), ((11, 0), False)],
)  # fmt: skip
def test_the_architectures_of_this_torch(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kaggle's P100 and V100 are seen by torch, and fail at the first kernel."""
    device = Device("cuda", 0, "Tesla P100", 1 << 34, capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT)
    monkeypatch.setattr(frugal.device, "probe", lambda: device)
    if runs:
        assert usable() is device
        return
    with pytest.raises(UnsupportedError, match="has no kernels for it, only for sm_75, sm_80") as caught:
        usable()
    assert ("An older torch" in str(caught.value)) == (capability < (7, 5))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [*BUILT, "compute_90"])
    assert (no_kernels(device) is None) == (capability >= (9, 0)), "PTX runs on anything later"
