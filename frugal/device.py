"""What the machine can do: the device, its memory, and the dtype to compute in. Nothing here runs at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from frugal.errors import UnsupportedError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Device:
    """One device a run computes on."""

    kind: Literal["cpu", "cuda"]
    index: int
    name: str
    total_bytes: int
    """Memory of the device; of the machine for a CPU."""
    capability: tuple[int, int] | None
    """CUDA compute capability, for example (7, 5) for a T4; None for a CPU."""
    has_bf16: bool
    """bfloat16 arithmetic in hardware (compute capability 8.0 and later). False for CPUs, where it is 20 to 150 times
    slower than float32 without special instructions."""

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype a run computes in. Adapters and optimizer state are float32 whatever it is."""

    compute: torch.dtype
    loss_scaling: bool
    """float16 has 5 exponent bits: small gradients vanish unless the loss is scaled up first."""
    reason: str


def probe() -> Device:
    """The device this process would train on: the current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        return Device(
            "cuda", index, properties.name, properties.total_memory, capability, has_bf16=_capable_of_bf16(capability)
        )
    return Device("cpu", 0, "CPU", psutil.virtual_memory().total, None, has_bf16=False)


def _capable_of_bf16(capability: tuple[int, int]) -> bool:
    """AMD devices (which report their own numbers) all have it; NVIDIA's from 8.0 on. 7.5 only emulates it."""
    return torch.version.hip is not None or capability >= (8, 0)


def resolve_dtype(asked: str, device: Device) -> DtypeChoice:
    """The compute dtype for ``model.dtype`` (auto, bfloat16, float16, float32) on ``device``.

    Raises:
        UnsupportedError: bfloat16 was asked for by name on a GPU that has none. Call this before any download.
    """
    if asked == "auto":
        if device.kind == "cpu":
            return DtypeChoice(torch.float32, False, "CPU: 16-bit matrix products are many times slower than float32")
        if device.has_bf16:
            return DtypeChoice(torch.bfloat16, False, f"{device.name} has bfloat16")
        return DtypeChoice(
            torch.float16, True, f"{device.name}{_capability(device)} has no bfloat16: float16 with loss scaling"
        )
    dtype = _DTYPES.get(asked)
    if dtype is None:
        raise UnsupportedError(f"model.dtype is {asked!r}; allowed: auto, {', '.join(_DTYPES)}.")
    if dtype is torch.bfloat16 and device.kind == "cuda" and not device.has_bf16:
        raise UnsupportedError(
            f"model.dtype: bfloat16 was asked for, but {device.name}{_capability(device)} has no bfloat16 (compute "
            "capability 8.0 and later have it). Write `model.dtype: auto` (float16 with loss scaling here) or "
            "`model.dtype: float32` (slower, needs no scaling)."
        )
    slow = "; on a CPU many times slower than float32" if device.kind == "cpu" and dtype is not torch.float32 else ""
    return DtypeChoice(dtype, dtype is torch.float16, f"asked for by model.dtype{slow}")


def _capability(device: Device) -> str:
    return "" if device.capability is None else f" (compute capability {device.capability[0]}.{device.capability[1]})"
