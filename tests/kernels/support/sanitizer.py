"""A sanitizer around Triton's interpreter.

While `checked` is open, every launch of a kernel

- is checked for bounds: each loaded, stored or atomically updated address must lie on an element of a tensor that was
  passed to the launch (strided views count element by element, so the columns between two rows of a view are outside);
- runs its programs in shuffled order (a grid promises none), or only the programs asked for, at the real grid size;
- is checked for races: an address that two programs write, that one writes and another reads, or that is updated
  atomically by one and plainly by another; lanes of one program that store to one address;
- sees garbage where hardware gives it: masked lanes of a load without ``other`` are NaN (a large number for integers),
  and memory allocated inside the context is NaN until written;
- has its bytes counted: distinct bytes of each load instruction and program, bytes of each store.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorDescriptor, TensorHandle

from tests.kernels.support.bf16 import replaced, right_bf16

Programs = Callable[[tuple[int, int, int]], Iterable[tuple[int, int, int]]]


class KernelFault(AssertionError):
    """An access out of bounds or a race."""


@dataclass
class Report:
    """What the kernels in a `checked` context did."""

    loaded: int = 0
    stored: int = 0
    updated: int = 0
    """Bytes of atomic updates."""
    resident: int = 0
    """Bytes loaded from tensors named as resident; not part of ``loaded``."""
    launches: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """All bytes that went to or came from memory; an atomic update is a load and a store."""
        return self.loaded + self.stored + 2 * self.updated


class _Memory:
    """Tensors of one launch: which addresses are elements."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.regions: list[tuple[int, int, list[tuple[int, int]], int]] = []
        for t in tensors:
            if not t.numel():
                continue
            size = t.element_size()
            base = t.data_ptr()
            end = base + (sum((n - 1) * abs(s) for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * size
            axes: list[tuple[int, int]] = []
            if not t.is_contiguous():
                axes = sorted(((s * size, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1), reverse=True)
            self.regions.append((base, end, axes, size))

    def inside(self, addresses: Any, width: int) -> Any:
        """Bool of each address: ``width`` bytes from there are (part of) an element."""
        good = np.zeros(addresses.shape, dtype=bool)
        for base, end, axes, size in self.regions:
            here = (addresses >= np.uint64(base)) & (addresses + np.uint64(width) <= np.uint64(end))
            if axes and here.any():
                rest = (addresses - np.uint64(base)).astype(np.int64)
                for stride, count in axes:
                    if stride == 0:
                        continue
                    index = rest // stride
                    here &= index < count
                    rest = rest - index * stride
                here &= rest + width <= size
            good |= here
        return good


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, tuple):
            found += _tensors(value)
        elif isinstance(value, TensorDescriptor):
            found += _tensors([value.base])
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


class _Watcher:
    def __init__(
        self, report: Report, seed: int | None, programs: Programs | None, races: bool, resident: list[torch.Tensor]
    ) -> None:
        self.report, self.seed, self.programs, self.races = report, seed, programs, races
        self.resident = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in resident]
        self.memory = _Memory([])
        self.program = 0
        self.where: tuple[int, int, int] = (0, 0, 0)
        self.kernel = ""
        self.logs: dict[str, list[tuple[Any, int]]] = {}

    # One launch

    def launch(self, executor: Any, *args_dev: Any, **kwargs: Any) -> None:
        spec = inspect.getfullargspec(executor.fn)
        kwargs = {k: v for k, v in kwargs.items() if k in spec.args or k in spec.kwonlyargs}
        self.kernel = executor.fn.__name__
        self.report.launches.append(self.kernel)
        self.memory = _Memory(_tensors([*args_dev, *kwargs.values()]))
        self.logs = {"load": [], "store": [], "atomic": []}
        scope = interpreter._patch_lang(executor.fn)
        try:
            args = inspect.getcallargs(executor.fn, *args_dev, **kwargs)
            args = {k: v if k in executor.constexprs else interpreter._implicit_cvt(v) for k, v in args.items()}
            grid = executor.grid(args) if callable(executor.grid) else executor.grid
            grid = (*tuple(grid), 1, 1)[:3]
            builder = interpreter.interpreter_builder
            builder.set_grid_dim(*grid)
            with np.errstate(all="ignore"):
                for program, where in enumerate(self._order(grid)):
                    self.program, self.where = program, where
                    builder.set_grid_idx(*self.where)
                    executor.fn(**args)
        finally:
            scope.restore()
        if self.races:
            self._find_races()

    def _order(self, grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        if self.programs is not None:
            return list(self.programs(grid))
        every = np.arange(grid[0] * grid[1] * grid[2])
        if self.seed is not None:
            every = np.random.default_rng(self.seed).permutation(every.size)
        return [(int(i) % grid[0], int(i) // grid[0] % grid[1], int(i) // (grid[0] * grid[1])) for i in every]

    # One access

    def access(self, kind: str, pointers: Any, mask: Any) -> None:
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        shape = np.broadcast_shapes(pointers.data.shape, mask.shape)
        addresses = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask, shape)].ravel()
        if not addresses.size:
            return
        distinct = np.unique(addresses)
        good = self.memory.inside(distinct, width)
        if not good.all():
            raise KernelFault(
                f"{self.kernel}: {kind} out of bounds, {int((~good).sum())} of {distinct.size} addresses, program "
                f"{self.where}"
            )
        if kind == "load":
            if any(lo <= int(distinct[0]) < hi for lo, hi in self.resident):
                self.report.resident += distinct.size * width
            else:
                self.report.loaded += distinct.size * width
        elif kind == "store":
            self.report.stored += distinct.size * width
            if distinct.size != addresses.size:
                self.report.races.append(f"{self.kernel}: {addresses.size - distinct.size} lanes store to one address")
        else:
            self.report.updated += addresses.size * width
        if self.races:
            self.logs[kind].append((distinct, self.program))

    def _find_races(self) -> None:
        def flat(kind: str) -> tuple[Any, Any]:
            log = self.logs[kind]
            if not log:
                return np.zeros(0, np.uint64), np.zeros(0, np.int64)
            where = np.concatenate([a for a, _ in log])
            who = np.concatenate([np.full(a.size, p, dtype=np.int64) for a, p in log])
            order = np.lexsort((who, where))
            where, who = where[order], who[order]
            new = np.ones(where.size, dtype=bool)
            new[1:] = (where[1:] != where[:-1]) | (who[1:] != who[:-1])
            return where[new], who[new]

        written, writer = flat("store")
        read, reader = flat("load")
        updated, _ = flat("atomic")
        found = self.report.races
        twice = written[1:][written[1:] == written[:-1]]
        if twice.size:
            found.append(f"{self.kernel}: {np.unique(twice).size} addresses are written by more than one program")
        if written.size and read.size:
            at = np.clip(np.searchsorted(written, read), 0, written.size - 1)
            bad = (written[at] == read) & (writer[at] != reader)
            if bad.any():
                found.append(f"{self.kernel}: {int(bad.sum())} addresses are read by one program, written by another")
        if updated.size and (np.isin(updated, written).any() or np.isin(updated, read).any()):
            found.append(f"{self.kernel}: atomic and plain accesses to one address")


def _garbage(dtype: Any) -> Any:
    """What a masked lane without ``other`` holds."""
    if dtype == tl.bfloat16:
        return 0x7FC0
    return np.nan if dtype.is_floating() else (1 if dtype == tl.int1 else 85)


def _watched(watcher: _Watcher) -> dict[tuple[type, str], Callable[..., Any]]:
    plain_load = InterpreterBuilder.create_masked_load
    plain_store = InterpreterBuilder.create_masked_store
    plain_atomic = InterpreterBuilder.create_atomic_rmw

    def load(self: Any, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any) -> Any:
        lanes = np.ones_like(ptrs.data, dtype=bool) if mask is None else mask.data
        watcher.access("load", ptrs, lanes)
        if other is None:
            kind = ptrs.get_element_ty()
            other = TensorHandle(np.full(ptrs.data.shape, _garbage(kind), interpreter._get_np_dtype(kind)), kind)
        return plain_load(self, ptrs, mask, other, cache_policy, is_volatile)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        watcher.access("store", ptrs, np.ones_like(ptrs.data, dtype=bool) if mask is None else mask.data)
        return plain_store(self, ptrs, value, mask, cache_policy)

    def atomic(self: Any, rmw_op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        watcher.access("atomic", ptr, np.ones_like(ptr.data, dtype=bool) if mask is None else mask.data)
        return plain_atomic(self, rmw_op, ptr, val, mask, sem, scope)

    return {
        (GridExecutor, "__call__"): lambda executor, *args, **kwargs: watcher.launch(executor, *args, **kwargs),
        (InterpreterBuilder, "create_masked_load"): load,
        (InterpreterBuilder, "create_masked_store"): store,
        (InterpreterBuilder, "create_atomic_rmw"): atomic,
    }


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """torch.empty gives NaN (the largest number for integers) in this context."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def checked(
    *,
    seed: int | None = 0,
    programs: Programs | None = None,
    races: bool = True,
    poison: bool = True,
    resident: Iterable[torch.Tensor] = (),
) -> Iterator[Report]:
    """Run the kernels launched inside under the sanitizer; raises `KernelFault` at the end if they raced.

    ``seed`` shuffles the programs (None: in order). ``programs`` maps the grid (x, y, z) to the only program ids that
    shall run. ``poison`` fills memory allocated inside with NaN: turn it off for real sizes. Loads from ``resident``
    tensors (small ones that every program reads, so that the second-level cache keeps them) are counted apart.
    """
    report = Report()
    watcher = _Watcher(report, seed, programs, races, list(resident))
    with right_bf16(), replaced(_watched(watcher)):
        if poison:
            with _poisoned_allocations():
                yield report
        else:
            yield report
    if report.races:
        raise KernelFault("; ".join(dict.fromkeys(report.races)))
