"""What memory there is: free of a GPU, not its size; a group's, not the machine's; a budget with the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frugal import host_memory
from frugal.device import Device, describe
from frugal.errors import ConfigError
from frugal.memory import device_memory
from frugal.memory.device_memory import CUDA_CONTEXT_BYTES, DeviceMemory, grow_segments, limited, look
from frugal.memory.space import OutOfHostMemory, refuse_when_host_is_full

GIB = 1 << 30
GPU = Device("cuda", 0, "RTX 3090", 24 * GIB, (8, 6))


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What torch's allocator was limited to."""
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: found.append(part))
    monkeypatch.setattr(device_memory, "spills", lambda: False)
    return found


def test_a_plan_is_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: 6 GiB are somebody else's; what this process holds is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 1 * GIB)
    seen = look(GPU, outside_bytes=1 * GIB)
    assert seen == DeviceMemory(24 * GIB, 16 * GIB, 2 * GIB)
    assert seen.others_bytes == 6 * GIB
    assert look(Device("cuda", 0, "planned", 8 * GIB, (8, 6), here=False)) is None
    assert look(describe("cpu")) is None


def test_a_budget_counts_the_context_and_ends_with_the_run(fractions: list[float]) -> None:
    """M3: in a notebook the next run, without a budget, had the former one's."""
    with limited(GPU, 6 * GIB):
        assert fractions == [(6 * GIB - CUDA_CONTEXT_BYTES) / (24 * GIB)]
    assert fractions[1:] == [1.0]
    with pytest.raises(RuntimeError), limited(GPU, 6 * GIB):
        raise RuntimeError
    assert fractions[-1] == 1.0
    with (
        pytest.raises(ConfigError, match=r"memory\.budget: 0\.39 GiB is less than CUDA itself takes"),
        limited(GPU, 400 << 20),
    ):
        pass


def test_a_larger_budget_than_others_leave(fractions: list[float]) -> None:
    with limited(GPU, 23 * GIB, others_bytes=4 * GIB):
        assert fractions == [(20 * GIB - CUDA_CONTEXT_BYTES) / (24 * GIB)]


def test_without_a_budget_only_drivers_that_spill_are_limited(
    fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M1: on Windows and under WSL a full GPU is no error but a tenth of the speed."""
    with limited(GPU, None, others_bytes=2 * GIB), limited(describe("cpu"), 6 * GIB):
        assert fractions == []
    monkeypatch.setattr(device_memory, "spills", lambda: True)
    with limited(GPU, None, others_bytes=2 * GIB):
        assert fractions == [(22 * GIB - CUDA_CONTEXT_BYTES) / (24 * GIB)]


def test_wsl_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, there in (("5.15.153.1-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)):
        monkeypatch.setattr("platform.release", lambda release=release: release)
        assert device_memory.spills() == there


# ---- segments that grow ----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings that the allocator was given, on a machine with a GPU that nothing has used."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_segments_grow_where_the_user_said_nothing_else(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """M2."""
    assert grow_segments() is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert grow_segments() is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert grow_segments() is None
    assert asked == ["expandable_segments:True", "max_split_size_mb:128,expandable_segments:True"]


def test_what_came_late_or_not_at_all_is_said(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 2 * GIB)
    assert "2.00 GiB of the device were reserved before this run" in str(grow_segments())

    def fails(settings: str) -> None:
        raise RuntimeError("allocator already configured")

    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", fails)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(grow_segments())


# ---- the host --------------------------------------------------------------------------------------------------------


def group(root: Path, name: str, version: int, limit: Any, used: int, cache: int) -> Path:
    """A control group with its files."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n")
    return folder


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cgroup"
    monkeypatch.setattr(host_memory, "CGROUPS", root)
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "self")
    return root


def test_the_limit_of_a_container(groups: Path, tmp_path: Path) -> None:
    """M5: 1 GiB of 2 is in use, of which half is cache of files: 1.5 GiB are left, whatever the machine has."""
    (tmp_path / "self").write_text("0::/job/step\n")
    group(groups, "job", 2, 2 * GIB, 1 * GIB, GIB // 2)
    group(groups, "job/step", 2, "max", GIB // 4, 0)
    assert host_memory.total_bytes() == 2 * GIB == describe("cpu").total_bytes
    assert host_memory.available_bytes() == 3 * GIB // 2
    with pytest.raises(OutOfHostMemory):
        refuse_when_host_is_full(3 * GIB // 2)


def test_version_1_and_no_limit(groups: Path, tmp_path: Path) -> None:
    before = (tmp_path / "self").write_text("4:cpu,cpuacct:/x\n3:memory:/docker/abc\n")
    group(groups, "memory/docker/abc", 1, 1 * GIB, GIB // 2, 0)
    group(groups, "memory", 1, 9223372036854771712, 9 * GIB, 0)
    assert before
    assert host_memory.available_bytes() == GIB // 2
    (tmp_path / "self").write_text("0::/\n")
    assert host_memory.total_bytes() > 2 * GIB, "the machine's own"
    (tmp_path / "self").unlink()
    assert host_memory.available_bytes() > 0
