"""One launch of a Triton kernel as a value: what runs it, compiles it for another GPU, or counts its bytes.

Every launch function of this package has a `prepare_...` twin that returns a `Launch` and touches no memory, so meta
tensors of real sizes do. The same value is run on a GPU, interpreted in the tests and compiled ahead of time for
GPUs that are not here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from frugal.device import describe
from frugal.ops.tile_table import TILES

ALIGNMENT = 16  # Triton compiles another variant where a pointer or an integer is a multiple of 16


@dataclass(frozen=True)
class Launch:
    """``kernel[grid](*args, **constants, **options)``."""

    kernel: Any
    grid: tuple[int, ...]
    args: Sequence[Any]
    """In the order of the kernel's parameters that are no ``tl.constexpr``: tensors, ints, floats, None."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """The ``tl.constexpr`` parameters."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """num_warps, num_stages, enable_fp_fusion (on unless given: Triton's own default changes with its version)."""

    @property
    def compile_options(self) -> dict[str, Any]:
        """`options` with what has a default here."""
        return {"enable_fp_fusion": True, **self.options}

    def run(self) -> None:
        """Launch on the device of the first tensor. An empty grid launches nothing."""
        if not all(self.grid):
            return
        device = next(arg.device for arg in self.args if isinstance(arg, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](*self.args, **self.constants, **self.compile_options)

    def specialisation(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
        """(signature, constants, attributes) as Triton's launcher derives them from the arguments.

        Integers that are 1 and None become constants; pointers and integers that are multiples of 16 are marked.
        """
        from triton.runtime.jit import mangle_type  # an internal name of Triton's: launching must not depend on it

        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        values = iter(self.args)
        for index, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                signature[name], constants[name] = "constexpr", self.constants[name]
                continue
            value = next(values)
            if value is None or (isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = "fp32" if isinstance(value, float) else mangle_type(value)
            if isinstance(value, Tensor):
                aligned = value.storage_offset() * value.element_size() % ALIGNMENT == 0
            else:
                aligned = isinstance(value, int) and value % ALIGNMENT == 0
            if aligned:
                attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
        return signature, constants, attributes


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def tile(kernel: str, dtype: torch.dtype, device: torch.device, target: str | None = None) -> dict[str, int]:
    """The tile of ``kernel`` (its constants, num_warps, ...) for elements of ``dtype``: nothing is tuned in a run.

    `TILES` is written by `benchmarks/kernels_sweep.py` and `attention_sweep.py`, which compile candidates for every
    target and keep those without spills and within the card's shared memory. A target's own entry wins over "default".
    ``target`` is "sm_86" or the like; unset, that of ``device`` ("default" for devices that are not CUDA). A kernel
    that no row names is an error of the program: ``KeyError``.
    """
    key = f"{kernel}/{8 * dtype.itemsize}"
    rows = TILES[key]
    if target is None:
        target = _label(device)
    return dict(rows.get(target, rows["default"]))


@functools.cache
def _label(device: torch.device) -> str:
    return describe(device).label
