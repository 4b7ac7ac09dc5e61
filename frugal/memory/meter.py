"""The live-bytes meter: peak bytes of live tensors in a region, by what the bytes are and where they came from.

On the CPU a dispatch mode sees every tensor an operation returns and follows its storage by weak reference until it
is freed, so the count is exact and nothing is copied or kept alive. Views share a storage and count once. On CUDA the
caching allocator's own statistics give the peak (``detail=True`` follows storages there too).

What it cannot see: scratch memory that a native kernel takes and gives back inside one operation, and memory that is
no tensor (allocator rounding, the interpreter, libraries). Operations written in Python (``torch.library`` custom ops,
those of bitsandbytes among them) are opened, so that their inner tensors count.

torch's own `torch.distributed._tools.mem_tracker.MemTracker` follows storages the same way. It lacks what the planner
needs: the peak of every allocation site (it keeps snapshots of modules), bytes inside operations written in Python, a
limit, and recomputation told apart from saved activations.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from frugal.memory.meter_report import (
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    SAVED,
    TEMPORARIES,
    MeterReport,
    Site,
    model_tensors,
    optimizer_tensors,
)


class _Record:
    """One storage: how large, when it came and went (on the meter's clock of allocations), what it is, where from."""

    __slots__ = ("born", "category", "died", "nbytes", "site")

    def __init__(self, nbytes: int, born: int, category: str, site: tuple[str, str, Any]) -> None:
        self.nbytes, self.born, self.died, self.category, self.site = nbytes, born, -1, category, site


class MeterDispatch(TorchDispatchMode):
    """Feeds the outputs of every operation to the meter."""

    def __init__(self, meter: LiveBytesMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter = meter
        self.aliases: dict[Any, bool] = {}
        self.composite: dict[Any, bool] = {}
        self.opened = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._call(func, args, kwargs or {})
        aliases = self.aliases.get(func)
        if aliases is None:
            returns = func._schema.returns
            aliases = self.aliases[func] = any(r.alias_info is not None for r in returns)
        self.meter._seen(out, func, _storages((args, kwargs)) if aliases else None)
        if func.namespace == "fsdp":  # it gathers into storages that it empties and fills without any operation
            self.meter._watch(tree_iter((args, kwargs)), func)
        return out

    def _is_composite(self, func: Any) -> bool:
        found = self.composite.get(func)
        if found is None:
            found = has_kernel(func, "CompositeImplicitAutograd") and not has_kernel(func, "CPU")
            self.composite[func] = found
        return found

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        namespace = func.namespace
        if namespace in ("aten", "prim", "prims"):
            # Nothing above the mode has taken it apart in there.
            if self.opened and namespace == "aten" and self._is_composite(func):
                with self:
                    return func.decompose(*args, **kwargs)
            return func(*args, **kwargs)
        # An operation implemented in Python: go past the mode to its kernel with the mode on again, so that its inner
        # tensors are seen. Its autograd rule ran already, above this mode.
        device = next((x.device.type for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)), "cpu")
        # Only frugal's own kernels can do without values: of fake tensors they allocate what they do on this machine.
        fake = namespace != "frugal" and any(isinstance(x, FakeTensor) for x in tree_iter((args, kwargs)))
        keys = None if fake else kernel_keys(func, device)
        if keys is None:
            return func(*args, **kwargs)
        self.opened += 1
        try:
            with self:
                return func.redispatch(keys, *args, **kwargs)
        finally:
            self.opened -= 1


class OutOfBudget(RuntimeError):
    """Live bytes went over the limit that a meter was given."""


class LiveBytesMeter:
    """Measures one region::

        meter = LiveBytesMeter(model, optimizer)
        with meter:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        print(meter.report().table())

    ``detail=None`` follows storages on the CPU and reads the allocator on CUDA; ``detail=True`` follows storages on any
    device (also fake ones). Saved activations are what a forward leaves behind when a backward begins; what a backward
    recomputes counts as temporaries. ``limit_bytes`` makes the region end with `OutOfBudget` at the first storage above
    it, where storages are followed: a device of that size on any machine. The meter costs Python time on every
    operation: never time a region with it on.
    """

    dispatch_class: type[MeterDispatch] = MeterDispatch

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        device: torch.device | str | None = None,
        detail: bool | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        first = next(model.parameters(), None) if model is not None else None
        self.device = torch.device(device) if device is not None else first.device if first is not None else _cpu()
        self.detail = self.device.type != "cuda" if detail is None else detail
        self.model = model
        self.optimizer = optimizer
        self.limit_bytes = limit_bytes
        self._live: dict[int, _Record] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._records: list[_Record] = []
        self._watched: set[int] = set()
        self._clock = 0
        self._total = self._start = self._end = 0
        self._peak = self._peak_clock = 0
        self._in_backward = False
        self._names: dict[nn.Module, str] = {}
        self._stack: list[str] = [""]
        self._bounds: list[int] = [0]  # autograd sequence numbers at which ...
        self._owners: list[str] = [""]  # ... this module began to create nodes
        self._handles: list[Any] = []
        self._dispatch: MeterDispatch | None = None
        self._allocator_peak = self._allocator_start = 0
        self.reserved_bytes = 0
        """Most that CUDA's allocator held in the region, whether in use or not; 0 elsewhere."""
        if model is not None:
            self.register_model(model)
        if optimizer is not None:
            self.register(OPTIMIZER, optimizer_tensors(optimizer))

    # ---- what exists before the region ---------------------------------------------------------------------------

    def register(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count existing tensors as live from the start. A storage already known takes the new category."""
        for tensor in tensors:
            for stored in self._stored(tensor):
                record = self._live.get(_key(stored))
                if record is None:
                    self._add(stored, category, ("", "", "existing"), existing=True)
                else:
                    record.category = category

    def _stored(self, tensor: Any) -> Iterator[torch.Tensor]:
        """The tensors that hold a tensor's values: itself, what a wrapper (DTensor) holds here, or nothing."""
        if is_traceable_wrapper_subclass(tensor):  # its own storage has the whole's size and no memory
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from (stored for x in parts if isinstance(x, torch.Tensor) for stored in self._stored(x))
        elif not tensor.is_meta or self.device.type == "meta":  # else names and shapes alone
            yield tensor

    def register_model(self, model: nn.Module) -> None:
        """Register parameters, buffers, gradients and quantisation state of a model."""
        for category, tensor in model_tensors(model):
            self.register(category, [tensor])
        self.register(GRADIENTS, [p.grad for p in model.parameters() if p.grad is not None])

    # ---- the region ----------------------------------------------------------------------------------------------

    def __enter__(self) -> LiveBytesMeter:
        if self._dispatch is not None or self._clock:
            raise RuntimeError("a LiveBytesMeter measures one region: make a new one for the next")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._allocator_start = torch.cuda.memory_allocated(self.device)
        if self.detail:
            if self.model is not None:
                self._hook_modules(self.model)
            self._peak = self._total
            self._dispatch = self.dispatch_class(self)
            self._dispatch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._dispatch is not None:
            self._dispatch.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._allocator_peak = torch.cuda.max_memory_allocated(self.device)
            self.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
        if self.optimizer is not None:
            for tensor in optimizer_tensors(self.optimizer):
                if (record := self._live.get(_key(tensor))) is not None:
                    record.category = OPTIMIZER
        self._end = self._total

    def _hook_modules(self, model: nn.Module) -> None:
        # Hooks on the modules themselves would make fused operations step aside (they must not swallow a hook).
        self._names = {module: name for name, module in model.named_modules()}
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(register_module_forward_hook(self._leave, always_call=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._mark_gradient))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._names:
            self._stack.append(self._names[module])
            self._bounds.append(next_sequence_number())
            self._owners.append(self._names[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._names:
            self._stack.pop()
            self._bounds.append(next_sequence_number())
            self._owners.append(self._stack[-1])

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and (record := self._live.get(_key(parameter.grad))) is not None:
            record.category = GRADIENTS

    # ---- storages ------------------------------------------------------------------------------------------------

    def _seen(self, out: Any, func: Any, sources: set[int] | None) -> None:
        """``sources``: storages of the inputs of an operation that may return a view of one of them."""
        if self._watched:
            self._look_again()
        in_backward = in_backward_pass()
        if in_backward and not self._in_backward:
            for left in self._live.values():
                if left.category == TEMPORARIES:
                    left.category = SAVED
        self._in_backward = in_backward
        found = (out,) if isinstance(out, torch.Tensor) else tree_iter(out)
        for tensor in (stored for x in found if isinstance(x, torch.Tensor) for stored in self._stored(x)):
            record = self._live.get(_key(tensor))
            if record is not None:
                self._resized(_storage(tensor), record)
            elif sources is not None and _key(tensor) in sources:  # a view of what was there before the region
                self._add(tensor, INPUTS, ("", "", "existing"), existing=True)
            else:
                self._add(tensor, TEMPORARIES, self._site(func, in_backward))

    def _watch(self, values: Iterable[Any], func: Any) -> None:
        """Follow the sizes of these tensors' storages from now on."""
        for tensor in values:
            if isinstance(tensor, torch.Tensor) and _storage(tensor).nbytes():
                if _key(tensor) not in self._live:
                    self._add(tensor, TEMPORARIES, self._site(func, self._in_backward))
                record = self._live[_key(tensor)]
                if record.category == INPUTS and _key(tensor) not in self._watched:
                    self._was_not_there(record, func)
                self._resized(_storage(tensor), record)
                self._watched.add(_key(tensor))

    def _was_not_there(self, record: _Record, func: Any) -> None:
        """It was empty when the region began, and a view of it was seen before the operation that tells."""
        record.born, record.category, record.site = self._clock, TEMPORARIES, self._site(func, self._in_backward)
        self._start -= record.nbytes
        self._peak = max(self._peak - record.nbytes, self._total)

    def _look_again(self) -> None:
        for key in list(self._watched):
            storage = self._refs[key]() if key in self._refs else None
            if storage is None:
                self._watched.discard(key)
            else:
                self._resized(storage, self._live[key])

    def _site(self, func: Any, in_backward: bool) -> tuple[str, str, Any]:
        node = current_autograd_node() if in_backward else None
        if node is None or len(self._stack) > 1:  # a forward, or a forward that runs again inside backward
            return self._stack[-1], "recompute" if in_backward else "", func
        number = node._sequence_nr()
        owner = self._owners[bisect.bisect_right(self._bounds, number) - 1] if number < 1 << 62 else ""
        return owner, str(node.name()), func

    def _add(self, tensor: torch.Tensor, category: str, site: tuple[str, str, Any], existing: bool = False) -> None:
        storage = _storage(tensor)
        key, nbytes = storage._cdata, storage.nbytes()
        if not nbytes:
            return
        if not existing:
            self._clock += 1
        record = _Record(nbytes, 0 if existing else self._clock, category, site)
        self._live[key] = record
        self._records.append(record)
        self._refs[key] = weakref.ref(storage, functools.partial(self._freed, key))
        if existing:  # it was there all the time: the peak so far held it too
            self._start += nbytes
            self._total += nbytes
            self._peak += nbytes
        else:
            self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self._total += nbytes
        if self._total > self._peak:
            self._peak, self._peak_clock = self._total, self._clock
        if self.limit_bytes is not None and self._total > self.limit_bytes and self._dispatch is not None:
            raise OutOfBudget(f"{self._total:,} live bytes, the budget is {self.limit_bytes:,}")

    def _resized(self, storage: torch.UntypedStorage, record: _Record) -> None:
        """A storage that was emptied, filled or enlarged is another one of the same kind."""
        nbytes = storage.nbytes()
        if nbytes != record.nbytes:
            record.died = self._clock
            self._total -= record.nbytes
            self._clock += 1
            self._live[storage._cdata] = _Record(nbytes, self._clock, record.category, record.site)
            self._records.append(self._live[storage._cdata])
            self._grow(nbytes)

    def _freed(self, key: int, _: object = None) -> None:
        record = self._live.pop(key, None)
        self._refs.pop(key, None)
        if record is not None:
            record.died = self._clock
            self._total -= record.nbytes

    @property
    def inside_module(self) -> bool:
        """Whether a forward pass of the model is under way."""
        return len(self._stack) > 1

    # ---- the answer ----------------------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """Peak live bytes so far: of followed storages, or of the CUDA allocator without ``detail``."""
        return self._peak if self.detail else self._allocator_peak

    def report(self) -> MeterReport:
        """The peak split by category and site. Cheap until asked for: categories settle after the fact."""
        if not self.detail:
            return self._allocator_report()
        clock = self._peak_clock
        at_peak = [r for r in self._records if r.born <= clock and (r.died == -1 or r.died >= clock)]
        by_category: Counter[str] = Counter()
        by_site: dict[tuple[str, str, str], list[int]] = {}
        for record in at_peak:
            by_category[record.category] += record.nbytes
            group = by_site.setdefault((record.category, *_site_names(record.site)), [0, 0])
            group[0] += record.nbytes
            group[1] += 1
        sites = [Site(b, n, category, module, op) for (category, module, op), (b, n) in by_site.items()]
        last = max((r for r in at_peak), key=lambda r: r.born, default=None)
        return MeterReport(
            peak_bytes=self._peak,
            start_bytes=self._start,
            end_bytes=self._end,
            by_category={c: by_category[c] for c in CATEGORIES if by_category[c]},
            sites=sorted(sites, key=lambda s: -s.bytes),
            peak_op=": ".join(filter(None, _site_names(last.site))) if last is not None else "",
            source="dispatch",
        )

    def _allocator_report(self) -> MeterReport:
        by_category: Counter[str] = Counter()
        for record in self._live.values():
            by_category[record.category] += record.nbytes
        if self.optimizer is not None:
            by_category[OPTIMIZER] = sum(t.untyped_storage().nbytes() for t in optimizer_tensors(self.optimizer))
        by_category[TEMPORARIES] = max(0, self._allocator_peak - sum(by_category.values()))
        return MeterReport(
            peak_bytes=self._allocator_peak,
            start_bytes=self._allocator_start,
            end_bytes=torch.cuda.memory_allocated(self.device),
            by_category={c: by_category[c] for c in CATEGORIES if by_category[c]},
            sites=[],
            peak_op="",
            source="allocator",
        )


def _storages(values: Any) -> set[int]:
    return {_key(x) for x in tree_iter(values) if isinstance(x, torch.Tensor)}


def _cpu() -> torch.device:
    return torch.device("cpu")


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Of a DTensor what this process holds of it."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()


def _key(tensor: torch.Tensor) -> int:
    return int(_storage(tensor)._cdata)


def _site_names(site: tuple[str, str, Any]) -> tuple[str, str]:
    module, node, func = site
    name = ".".join("*" if part.isdigit() else part for part in module.split("."))
    op = func if isinstance(func, str) else str(func).removesuffix(".default")
    return name, f"{node} > {op}" if node else op


# ---- what torch keeps private: a new version of torch may move it, and test_private_torch says so ------------------


def in_backward_pass() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_autograd_node() -> Any:
    """The autograd node that is evaluated now; None outside a backward pass."""
    return torch._C._current_autograd_node()


def next_sequence_number() -> int:
    """The sequence number of the next autograd node that this thread creates."""
    return int(torch._C._autograd._get_sequence_nr())


def has_kernel(func: Any, key: str) -> bool:
    """Whether an operation has a kernel of its own for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def kernel_keys(func: Any, device_type: str) -> Any:
    """What to redispatch an operation with to reach its kernel on a device; None: it has none there."""
    key = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}.get(device_type)
    if key is None or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key.name):
        return None
    return torch._C.DispatchKeySet(key)
