"""What a device can do: its memory, the dtype to compute in, and a table of GPUs. Nothing here runs at import."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from frugal.errors import ConfigError, UnsupportedError
from frugal.units import GIB

BF16_FROM = (8, 0)
"""Compute capability from which NVIDIA GPUs have bfloat16 (and tensor cores that Triton uses)."""
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
    return torch.version.hip is not None or capability >= BF16_FROM


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


# name -> (GiB, compute capability)
_TABLE: dict[str, tuple[float, tuple[int, int]]] = {
    "GTX 1660": (6, (7, 5)), "RTX 2060": (6, (7, 5)), "RTX 2070": (8, (7, 5)), "RTX 2080": (8, (7, 5)),
    "RTX 2080 Ti": (11, (7, 5)), "T4": (15, (7, 5)), "V100 16GB": (16, (7, 0)), "V100 32GB": (32, (7, 0)),
    "RTX 3050": (8, (8, 6)), "RTX 3060": (12, (8, 6)), "RTX 3060 Ti": (8, (8, 6)), "RTX 3070": (8, (8, 6)),
    "RTX 3080": (10, (8, 6)), "RTX 3080 12GB": (12, (8, 6)), "RTX 3090": (24, (8, 6)), "RTX A4000": (16, (8, 6)),
    "RTX A5000": (24, (8, 6)), "RTX A6000": (48, (8, 6)), "A10": (24, (8, 6)), "A10G": (22.5, (8, 6)),
    "A16": (16, (8, 6)), "A40": (48, (8, 6)), "A30": (24, (8, 0)), "A100 40GB": (40, (8, 0)),
    "A100 80GB": (80, (8, 0)), "RTX 4060": (8, (8, 9)), "RTX 4060 Ti 16GB": (16, (8, 9)), "RTX 4070": (12, (8, 9)),
    "RTX 4070 Ti Super": (16, (8, 9)), "RTX 4080": (16, (8, 9)), "RTX 4090": (24, (8, 9)), "L4": (22.5, (8, 9)),
    "L40S": (45, (8, 9)), "RTX 6000 Ada": (48, (8, 9)), "H100 80GB": (80, (9, 0)), "H200": (140, (9, 0)),
    "B200": (180, (10, 0)), "RTX 5060 Ti 16GB": (16, (12, 0)), "RTX 5070": (12, (12, 0)),
    "RTX 5070 Ti": (16, (12, 0)), "RTX 5080": (16, (12, 0)), "RTX 5090": (32, (12, 0)),
    "RTX PRO 6000": (96, (12, 0)),
}  # fmt: skip

GPUS: dict[str, Device] = {
    name: Device("cuda", 0, name, int(size * GIB), capability, has_bf16=capability >= BF16_FROM)
    for name, (size, capability) in _TABLE.items()
}
"""For plans made where the GPU is not. Memory as the driver reports it: for some less than the printed size."""


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def find_gpu(name: str) -> Device:
    """A GPU by its name, written loosely: "rtx3060", "NVIDIA GeForce RTX 3060", "a100" (the smaller one).

    Raises ConfigError naming close ones.
    """
    keys = {_key(known): gpu for known, gpu in GPUS.items()}
    wanted = _key(name)
    if wanted in keys:
        return keys[wanted]
    sized = sorted(
        (gpu.total_bytes, key) for key, gpu in keys.items() if re.fullmatch(re.escape(wanted) + r"\d+gb", key)
    )
    if sized and wanted:
        return keys[sized[0][1]]
    close = difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)
    shown = ", ".join(keys[key].name for key in close) or ", ".join(GPUS)
    raise ConfigError(f"--gpu {name!r} is not in the table. Close: {shown}. Any other: give its memory, --vram 12GB.")
