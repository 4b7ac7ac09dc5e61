"""Tile sizes of kernels, from a committed table: nothing is tuned in a user's run.

`tile_table.TILES` is written by `benchmarks/kernels_sweep.py`, which compiles candidates for every target and keeps
those without spills and within the card's shared memory. A row is found by kernel and element size; the target's own
entry wins over ``default``.
"""

from __future__ import annotations

import functools

import torch

from frugal.kernels.attention_tiles import TILES as ATTENTION
from frugal.kernels.tile_table import TILES


def tile(kernel: str, dtype: torch.dtype, device: torch.device, target: str | None = None) -> dict[str, int]:
    """The tile of ``kernel`` (its constants, num_warps, ...) for elements of ``dtype``.

    ``target`` is "sm_86" or the like; unset, that of ``device`` ("default" for devices that are not CUDA). A kernel
    that no row names is an error of the program: ``KeyError``.
    """
    key = f"{kernel}/{8 * dtype.itemsize}"
    rows = ATTENTION[key] if key in ATTENTION else TILES[key]
    if target is None:
        target = _target_of(device)
    return dict(rows.get(target, rows["default"]))


def _target_of(device: torch.device) -> str:
    return "default" if device.type != "cuda" or torch.version.hip is not None else _cuda_target(device.index or 0)


@functools.cache
def _cuda_target(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"
