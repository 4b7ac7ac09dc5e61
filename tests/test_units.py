"""Sizes and times as people read them: memory in GiB, disks in decimal units."""

from __future__ import annotations

import pytest

from frugal.units import GIB, MIB, disk_size, gib, nominal_gib, seconds


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0.0 MiB"), (84.2 * MIB, "84.2 MiB"), (0.1 * GIB, "0.10 GiB"), (2.66 * GIB, "2.66 GiB"), (-GIB, "-1.00 GiB"),
     (1234.5 * GIB, "1,234.50 GiB")],
)  # fmt: skip
def test_memory(count: float, shown: str) -> None:
    assert gib(count) == shown


def test_sizes_of_devices() -> None:
    assert [nominal_gib(value * GIB) for value in (24, 11.5, 0.5)] == ["24 GiB", "11.5 GiB", "0.5 GiB"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(812, "812 bytes"), (1000, "1.0 kB"), (4_000_000, "4.0 MB"), (3.2e9, "3.2 GB"), (5e12, "5.0 TB")],
)
def test_files(count: float, shown: str) -> None:
    assert disk_size(count) == shown


def test_durations() -> None:
    assert [seconds(value) for value in (0.2, 59, 61, 3725)] == ["0.2 s", "59.0 s", "1 min 01 s", "1 h 02 min"]
