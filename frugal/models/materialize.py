"""Materialise a model's parameters from stored tensors, one at a time: quantised, or cast, as their module wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn

from frugal.codecs.nf4 import NF4Linear
from frugal.tensor_files import StoredTensor


@dataclass(frozen=True, slots=True)
class PendingTensor:
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
        return resident_dtype(self.entry.dtype, _table_ndim(self.module, len(self.entry.shape)), compute)


def pending(model: nn.Module, targets: Mapping[str, StoredTensor]) -> list[PendingTensor]:
    """``targets`` (model name -> stored tensor) with the modules that they belong to."""
    split = [(name.rpartition("."), entry) for name, entry in targets.items()]
    return [PendingTensor(entry, model.get_submodule(owner), part) for (owner, _, part), entry in split]


def _table_ndim(module: nn.Module, ndim: int) -> int:
    """``ndim`` in embeddings and linear layers, else 0: other matrices cannot be upcast on use, they must be ready."""
    return ndim if isinstance(module, nn.Linear | nn.Embedding) else 0


def resident_dtype(stored: torch.dtype, ndim: int, compute: torch.dtype) -> torch.dtype:
    """Dtype in memory of an unquantised tensor: matrices of 16 bits never become float32, everything else computes."""
    if not stored.is_floating_point:
        return stored
    if ndim >= 2 and stored.itemsize == 2 and compute == torch.float32:
        return stored
    return compute


def materialize(tensors: Iterable[PendingTensor], dtype: torch.dtype, device: torch.device) -> None:
    """Read each tensor, in the order of the files, quantise or cast it on ``device``, and drop it before the next.

    Holds what was materialised so far and one tensor. Raises ModelError when a file ends too early.
    """
    with contextlib.ExitStack() as stack:
        handles: dict[Path, IO[bytes]] = {}
        for each in sorted(tensors, key=lambda each: (each.entry.file, each.entry.begin)):
            entry = each.entry
            if entry.file not in handles:
                handles[entry.file] = stack.enter_context(open(entry.file, "rb", buffering=0))
            tensor = entry.read(handle=handles[entry.file]).to(device)
            if each.quantised:
                assert isinstance(each.module, NF4Linear)
                each.module.quantize_(tensor if tensor.dtype.itemsize <= 4 else tensor.float())
            else:
                set_tensor(each.module, each.part, tensor.to(each.resident(dtype)))
            del tensor  # else it lives while the next one is read


def set_tensor(module: nn.Module, part: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer that was on the meta device."""
    if part in module._parameters:
        module._parameters[part] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[part] = tensor


@dataclass(frozen=True)
class LoadedTensor:
    """What reading one tensor takes: bytes in the checkpoint's dtype meanwhile, and in memory afterwards."""

    name: str
    read_bytes: int
    scratch_bytes: int
    """Temporaries of quantising it."""
    kept_bytes: int


def set_resident_dtypes(
    model: nn.Module, dense_bytes: Mapping[str, int], stored: torch.dtype, compute: torch.dtype
) -> list[LoadedTensor]:
    """Give every tensor of a ``model`` without memory the dtype that loading a checkpoint in ``stored`` gives it.

    ``dense_bytes``: name of a parameter before quantisation -> bytes in the checkpoint. Returns what loading would
    handle, in the model's order.
    """
    tensors: list[LoadedTensor] = []
    done: set[int] = set()
    for owner, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            if parameter.dtype.is_floating_point:
                parameter.data = parameter.data.to(resident_dtype(stored, _table_ndim(module, parameter.ndim), compute))
            name = f"{owner}.{part}".removeprefix(".")
            read = dense_bytes.get(name)
            if read is not None:  # the scales of an NF4 layer come with its weight
                scales = _scale_bytes(module) if part == "weight" else 0
                scratch = 3 * (read // stored.itemsize // 64) * 4 if scales else 0
                tensors.append(LoadedTensor(name, read, scratch, parameter.nbytes + scales))
    return tensors


def _scale_bytes(module: nn.Module) -> int:
    parts = [getattr(module, name, None) for name in ("absmax", "nested_absmax", "offset")]
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
