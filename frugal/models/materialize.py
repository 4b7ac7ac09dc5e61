"""Stored tensors into the places of a model, one at a time: quantised, or cast, as the place wants it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn

from frugal.codecs.nf4 import NF4Linear
from frugal.models.checkpoint_files import StoredTensor


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor of a checkpoint and the parameter or buffer that it becomes."""

    entry: StoredTensor
    module: nn.Module
    part: str
    """Name of the parameter or buffer in ``module``."""

    @property
    def quantised(self) -> bool:
        """Whether the tensor becomes NF4 codes and scales."""
        return isinstance(self.module, NF4Linear) and self.part == "weight"

    def resident(self, compute: torch.dtype) -> torch.dtype:
        """Dtype in memory of a tensor that is not quantised."""
        # Only embeddings and linear layers can be widened while used; other matrices must be ready.
        is_table = isinstance(self.module, nn.Linear | nn.Embedding)
        return resident_dtype(self.entry.dtype, len(self.entry.shape) if is_table else 0, compute)


def resident_dtype(stored: torch.dtype, ndim: int, compute: torch.dtype) -> torch.dtype:
    """Dtype in memory of an unquantised tensor: matrices of 16 bits never become float32, everything else computes."""
    if not stored.is_floating_point:
        return stored
    if ndim >= 2 and stored.itemsize == 2 and compute == torch.float32:
        return stored
    return compute


def place(placements: Iterable[Placement], dtype: torch.dtype, device: torch.device) -> None:
    """Read each tensor, in the order of the files, quantise or cast it on ``device``, and drop it before the next.

    Holds what was placed so far and one tensor. Raises ModelError when a file ends too early.
    """
    with contextlib.ExitStack() as stack:
        handles: dict[Path, IO[bytes]] = {}
        for placement in sorted(placements, key=lambda each: (each.entry.file, each.entry.begin)):
            entry = placement.entry
            if entry.file not in handles:
                handles[entry.file] = stack.enter_context(open(entry.file, "rb", buffering=0))
            tensor = entry.read(handle=handles[entry.file]).to(device)
            if placement.quantised:
                assert isinstance(placement.module, NF4Linear)
                placement.module.quantize_(tensor if tensor.dtype.itemsize <= 4 else tensor.float())
            else:
                put(placement.module, placement.part, tensor.to(placement.resident(dtype)))
            del tensor  # else it lives while the next one is read


def put(module: nn.Module, part: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer that so far lies on the meta device."""
    if part in module._parameters:
        module._parameters[part] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[part] = tensor
