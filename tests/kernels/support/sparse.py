"""Tensors of real sizes that take no memory until they are touched."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_NO_RESERVE = 0x4000  # MAP_NORESERVE: pages are only promised


def sparse_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zero tensor of ``shape``; pages appear when written. 100 GB are fine as long as few are touched."""
    count = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
