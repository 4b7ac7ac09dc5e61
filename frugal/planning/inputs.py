"""What a plan is about: a base's configuration without its weights, and the device it is to run on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from frugal import host_memory
from frugal.decision import Decision
from frugal.device import BF16_FROM, Device, find_gpu, resolve_dtype, usable
from frugal.errors import UnsupportedError
from frugal.memory.device_memory import look
from frugal.planning.architectures import known_architecture
from frugal.planning.source import configuration_folder
from frugal.units import nominal_gib, parse_size


@dataclass(frozen=True, kw_only=True)
class Planned(Device):
    """The device of a plan, and what it is to be used with."""

    host_bytes: int
    """Memory of the machine, or what --host-ram says; 0: not known."""
    dtype: Decision[torch.dtype]
    others_bytes: int = 0
    """Of the device's memory, in use by others now."""

    @classmethod
    def of(cls, device: Device, *, host_bytes: int, dtype: Decision[torch.dtype], others_bytes: int = 0) -> Planned:
        """A plan's view of ``device``."""
        return cls(**vars(device), host_bytes=host_bytes, dtype=dtype, others_bytes=others_bytes)


def planned_device(dtype: str, *, gpu: str | None, vram: str | None, host_ram: str | None) -> Planned:
    """The device that was named, else the one found. ``vram`` alone is a GPU of that size with bfloat16.

    Raises ConfigError for a name or size that cannot be read, UnsupportedError for a dtype the device has not, and
    where none was named and the GPU of this machine cannot be used.
    """
    host = parse_size(host_ram, "--host-ram") if host_ram is not None else 0
    if gpu is None and vram is None:
        found = usable()
        seen = look(found)
        host = host or host_memory.total_bytes()
        others = 0 if seen is None else seen.others_bytes
        return Planned.of(found, host_bytes=host, dtype=resolve_dtype(dtype, found), others_bytes=others)
    total = parse_size(vram, "--vram") if vram is not None else 0
    unknown = Device("cuda", 0, f"a GPU of {nominal_gib(total)}", total, BF16_FROM, here=False)
    device = find_gpu(gpu) if gpu is not None else unknown
    device = replace(device, total_bytes=total or device.total_bytes)
    return Planned.of(device, host_bytes=host, dtype=resolve_dtype(dtype, device))


def architecture(base: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of ``base``: a local folder, a name of the shipped table, or a hub id (of which
    config.json alone is read).

    Raises ModelError naming the ways to say it.
    """
    folder = configuration_folder(base, revision)
    if folder is not None:
        return _read(folder, trust_remote_code)
    return known_architecture(base)


def _read(folder: Path, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise UnsupportedError(f"{folder / 'config.json'} is of no model that transformers knows: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
