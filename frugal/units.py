"""Sizes and times as people read them. Memory is shown in GiB everywhere, what lies on a disk or comes over a network
in decimal units, as disks are sold and as `df -H` prints."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20


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
