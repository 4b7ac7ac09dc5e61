"""Memory of the host that this process may take: the machine's, or less where a control group limits it.

In containers and batch jobs the machine's figures are not the limit: a process that takes more than its group may is
killed, without an error that could be acted on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def total_bytes() -> int:
    """Memory of the machine, or the limit of this process's group where that is lower."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """What can still be taken, by the machine's account and by that of every group that this process is in."""
    free = [max(0, limit - used) for limit, used in _limits()]
    return min([int(psutil.virtual_memory().available), *free])


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, in use) of this process's groups that have a limit, from its own up to the root."""
    for folder, (limit_name, used_name) in _folders():
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        # version 1 says "no limit" by a number near 2^63
        if limit is not None and used is not None and limit < 1 << 60:
            yield limit, max(0, used - _file_cache(folder))


def _folders() -> Iterator[tuple[Path, tuple[str, str]]]:
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers not in ("",) and "memory" not in controllers.split(","):
            continue
        root = CGROUPS if controllers == "" else CGROUPS / "memory"
        names = ("memory.max", "memory.current") if controllers == "" else (
            "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
        parts = [part for part in own.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth]), names


def _file_cache(folder: Path) -> int:
    """Pages of files in the group's account that the kernel gives up as soon as somebody needs them."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = {key: int(value) for key, _, value in (line.partition(" ") for line in lines) if value.isdigit()}
    prefix = "total_" if "total_inactive_file" in found else ""  # version 1: with the groups below
    return sum(found.get(f"{prefix}{part}_file", 0) for part in ("inactive", "active"))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:  # no such group, or not ours to read
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
