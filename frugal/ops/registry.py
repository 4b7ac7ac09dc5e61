"""Which implementation of an operation serves a request, and why the others do not.

`frugal.ops.rows` says what each implementation can do; its callable is registered under the row's name by the module
that holds it (`implements`). `choose` walks the rows from the best to the plainest, keeps the reason of each refusal
and returns the first row that accepts; a row may also yield to a plainer one that serves a request better. `resolve`
is what operations call: it returns the callable of the row, for tensors that stand for a GPU in a plan as for real
ones, and notes what it gave, so that a run's manifest says what ran (`recording`).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from frugal.decision import Decision
from frugal.device import Device, describe
from frugal.errors import UnsupportedError
from frugal.ops.rows import PARAMETER_OPS, ROWS, Facts, no_tensor_cores
from frugal.ops.simulated import is_fake, simulated_device

AUTO = "auto"
MATRIX_PRODUCTS = "matrix products"


def choose(
    op: str,
    device: torch.device | str | Device,
    dtype: torch.dtype = torch.float32,
    *,
    named: str | None = None,
    **facts: Any,
) -> Decision[str]:
    """The first row of ``op`` that accepts ``device``, ``dtype`` and ``facts`` (window, softcap, head_size, ...).

    ``device`` may be one that is not here. ``named``: this row or an error, whatever is preferred. Raises
    `UnsupportedError` when no row accepts and ``KeyError`` for an unknown operation.
    """
    device = device if isinstance(device, Device) else describe(device)
    facts = {**facts, "device": device, "dtype": dtype}
    if named is not None:
        return _require(op, named, device, dtype, facts)
    rejected: dict[str, str] = {}
    for row in ROWS[op]:
        refusal = row.refusal(device.kind, dtype, facts) or row.yields(facts)
        if refusal is None:
            return Decision(op, row.name, row.why, rejected)
        rejected[row.name] = refusal
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected.items())
    raise UnsupportedError(f"{op} on {device.label} in {dtype} has no implementation here ({reasons})")


def _require(op: str, name: str, device: Device, dtype: torch.dtype, facts: Facts) -> Decision[str]:
    for row in ROWS[op]:
        if row.name != name:
            continue
        refusal = row.refusal(device.kind, dtype, facts)
        if refusal is None:
            return Decision(op, name, f"asked for by name: {row.why}")
        others = [r.name for r in ROWS[op] if r.refusal(device.kind, dtype, facts) is None and r.name != "reference"]
        way_out = f" Here {', '.join(others)} can: `auto` takes the first." if others else ""
        raise UnsupportedError(f"{op}: {name} was asked for but cannot run here: {refusal}.{way_out}")
    raise UnsupportedError(f"{op} has no implementation {name!r}; there are {', '.join(r.name for r in ROWS[op])}.")


def choices(
    device: torch.device | str | Device,
    dtype: torch.dtype,
    *,
    attention: str = AUTO,
    head_size: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    use_dora: bool = False,
) -> list[Decision[str]]:
    """One decision for each operation of the table, and one for matrix products. What no row can do is named "peft".

    Raises `UnsupportedError` when ``attention`` names what the device cannot run.
    """
    device = device if isinstance(device, Device) else describe(device)
    found = [matrix_products(device)]
    for op in ROWS:
        facts: dict[str, Any] = {}
        if op == "attention":
            facts = {"head_size": head_size, "window": window, "softcap": softcap}
            facts["named"] = None if attention == AUTO else attention
        elif op == "lora_linear":
            facts = {"use_dora": use_dora}
        try:
            found.append(choose(op, device, torch.float32 if op in PARAMETER_OPS else dtype, **facts))
        except UnsupportedError as refusal:
            if op == "attention":
                raise
            found.append(Decision(op, "peft", str(refusal)))
    return found


def check_attention(device: torch.device | str | Device, dtype: torch.dtype, attention: str) -> None:
    """Raise `UnsupportedError` when ``attention`` (`memory.attention`) names what the device cannot run at all.

    Heads, window and soft cap are the model's and are looked at when it is loaded. Call this before any download.
    """
    if attention != AUTO:
        choose("attention", device, dtype, named=attention)


def matrix_products(device: Device) -> Decision[str]:
    """Products of whole matrices are always the vendor's library."""
    if device.kind != "cuda" or device.amd:
        return Decision(MATRIX_PRODUCTS, "torch", f"the library that torch uses on {device.label}")
    why = no_tensor_cores(device) or "nothing that Triton makes of a plain product is faster"
    return Decision(MATRIX_PRODUCTS, "cuBLAS", why)


# ---- dispatch --------------------------------------------------------------------------------------------------------

Form = TypeVar("Form", bound=Callable[..., Any])
_FORMS: dict[tuple[str, str], Callable[..., Any]] = {}
"""(operation, row's name) -> the callable. All forms of an operation take the same arguments."""
_SIMULATED: dict[tuple[str, str], Callable[..., Any]] = {}
"""The same for tensors without memory: what allocates as the row's kernel does."""


def implements(op: str, name: str) -> Callable[[Form], Form]:
    """Register the decorated function as row ``name`` of ``op``."""
    if name not in {row.name for row in ROWS[op]}:
        raise ValueError(f"{op} has no row {name!r}; there are {', '.join(row.name for row in ROWS[op])}")

    def register(form: Form) -> Form:
        _FORMS[op, name] = form
        return form

    return register


def simulates(op: str, name: str) -> Callable[[Form], Form]:
    """Register the decorated function as what row ``name`` of ``op`` does to fake tensors of a GPU that is not here."""

    def register(form: Form) -> Form:
        _SIMULATED[op, name] = form
        return form

    return register


def _form(op: str, name: str, *, fake: bool) -> Callable[..., Any]:
    """The callable of a row. On fake tensors a kernel gives way to the next row, which allocates the same or more."""
    if not fake:
        (row,) = (row for row in ROWS[op] if row.name == name)
        if (op, name) not in _FORMS and row.module:
            importlib.import_module(row.module)
        return _FORMS[op, name]
    if (op, name) in _SIMULATED:
        return _SIMULATED[op, name]
    names = [row.name for row in ROWS[op]]
    return next(
        _FORMS[op, other] for other in names[names.index(name) :] if other != "triton" and (op, other) in _FORMS
    )


def resolve(
    op: str, like: Tensor, named: str | None = None, *, dtype: torch.dtype | None = None, **facts: Any
) -> tuple[Callable[..., Any], Decision[str]]:
    """The callable that computes ``op`` on tensors like ``like``, and why it is that one.

    Fake tensors on torch's meta device stand for the GPU that a plan is for, and the same rows decide. ``named`` takes
    that row whatever the device is (tests run kernels in an interpreter); a shape beyond its limits still falls back.
    """
    dtype = like.dtype if dtype is None else dtype
    fake = is_fake(like)
    planned = simulated_device() if like.device.type == "meta" else None
    key = (op, like.device, fake, dtype, named, planned, tuple(facts.items()))
    found = _RESOLVED.get(key)
    if found is None:
        found = _resolve(op, planned or like.device, dtype, named, facts, fake=fake)
        _RESOLVED[key] = found
    if not fake:
        _record(found[1])
    return found


_RESOLVED: dict[Any, tuple[Callable[..., Any], Decision[str]]] = {}


def _resolve(
    op: str, device: torch.device | Device, dtype: torch.dtype, named: str | None, facts: Facts, *, fake: bool
) -> tuple[Callable[..., Any], Decision[str]]:
    rejected: dict[str, str] = {}
    if named is not None:
        names = [row.name for row in ROWS[op]]
        if named not in names:
            raise ValueError(f"{op} has no implementation {named!r}; there are {', '.join(names)}")
        for row in ROWS[op][names.index(named) :]:
            limit = row.limits(facts)
            if limit is None:
                reason = "asked for by name" if row.name == named else row.why
                return _form(op, row.name, fake=fake), Decision(op, row.name, reason, rejected)
            rejected[row.name] = limit
    choice = choose(op, device, dtype, **facts)
    return _form(op, choice.value, fake=fake), Decision(
        op, choice.value, choice.reason, {**rejected, **choice.rejected}
    )


_RECORDS: list[dict[tuple[str, str], Decision[str]]] = []
_LOCK = threading.Lock()


def _record(decision: Decision[str]) -> None:
    for record in _RECORDS:
        record.setdefault((decision.key, decision.value), decision)


class Ran:
    """What was resolved while a `recording` was open."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Decision[str]] = {}

    def decisions(self) -> list[Decision[str]]:
        """One decision an operation; where several implementations ran, all their names, the first one first."""
        by_op: dict[str, list[Decision[str]]] = {}
        for decision in list(self.found.values()):
            by_op.setdefault(decision.key, []).append(decision)
        merged = []
        for op, ran in by_op.items():
            names = [one.value for one in ran]
            reason = "; ".join(dict.fromkeys(one.reason for one in ran))
            rejected = {name: why for one in ran for name, why in one.rejected.items() if not why.startswith("device ")}
            merged.append(Decision(f"op {op}", ", ".join(names), reason, rejected))
        return merged


@contextmanager
def recording() -> Iterator[Ran]:
    """Collect what operations resolve to inside, on any thread. Fake tensors are not counted."""
    ran = Ran()
    with _LOCK:
        _RECORDS.append(ran.found)
    try:
        yield ran
    finally:
        with _LOCK:
            _RECORDS[:] = [record for record in _RECORDS if record is not ran.found]
