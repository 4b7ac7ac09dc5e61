"""Sizes and times as people read them. Memory is shown in GiB everywhere, what lies on a disk or comes over a network
in decimal units, as disks are sold and as `df -H` prints."""

from __future__ import annotations

import re

from frugal.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20
_POWERS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def gib(n_bytes: float) -> str:
    """Format a memory size: `2.66 GiB`, and below a tenth of that in MiB: `84.2 MiB`."""
    if abs(n_bytes) < 0.1 * GIB:
        return f"{n_bytes / MIB:.1f} MiB"
    return f"{n_bytes / GIB:,.2f} GiB"


def nominal_gib(n_bytes: float) -> str:
    """Format the size of a device as it is sold: `24 GiB`, `11.5 GiB`."""
    return f"{n_bytes / GIB:.4g} GiB"


def disk_size(n_bytes: float) -> str:
    """Format a file size in decimal units: `812 bytes`, `3.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def seconds(count: float) -> str:
    """Format a duration: `8.4 s`, `6 min 12 s`, `3 h 05 min`."""
    if count < 60:
        return f"{count:.1f} s"
    whole = round(count)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def parse_size(text: str | int, what: str) -> int:
    """Parse "12GB", "11.5 GiB", "800MB" or "4096B". GB and GiB are both 2^30, as GPUs are sold.

    Raises:
        ConfigError: it is not a size, or has no unit; the message names `what`.
    """
    if re.fullmatch(r"\s*[0-9.]+\s*", str(text)):
        number = str(text).strip()
        raise ConfigError(f"{what}: {number} has no unit. Write {number}GB, or {number}B where bytes are meant.")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    power = None if match is None else _POWERS.get(re.sub(r"i?b$", "", match[2]))
    if match is None or power is None or float(match[1]) <= 0:
        raise ConfigError(f"{what} must be a size like 12GB, 11.5GiB or 800MB, got {str(text)!r}")
    return int(float(match[1]) * (1 << power))
