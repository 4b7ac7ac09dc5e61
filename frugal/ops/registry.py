"""One registry of operations: which implementation serves which device, dtype and shape, and why the others do not.

A row says what an implementation can do; its callable is registered under the row's name by the module that holds it
(`implements`). `choose` walks the rows from the best to the plainest, keeps the reason of each refusal and returns the
first row that accepts; a row may also yield to a plainer one that serves a request better. `resolve` is what operations
call: it returns the callable of the row, for tensors that stand for a GPU in a plan as for real ones, and notes what it
gave, so that a run's manifest says what ran (`recording`).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from frugal.decision import Decision
from frugal.errors import UnsupportedError
from frugal.ops.attention_choice import (
    FLASH_DTYPES,
    flash_attn_refusal,
    flash_attn_yields,
    sdpa_refusal,
    triton_refusal,
    triton_yields,
)
from frugal.ops.simulated import is_fake, simulated_device
from frugal.ops.target import MAX_NORM_COLUMNS, Target, no_triton, target_of

Facts = Mapping[str, Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ANY_DEVICE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Implementation:
    """One row: an implementation of one operation and what it can do."""

    name: str
    why: str
    devices: tuple[str, ...] = ANY_DEVICE
    dtypes: tuple[torch.dtype, ...] = FLOATS
    refuse: Callable[[Facts], str | None] = lambda facts: None
    limits: Callable[[Facts], str | None] = lambda facts: None
    """What it cannot do on any device: it falls back to the next row then also where it was asked for by name."""
    yields: Callable[[Facts], str | None] = lambda facts: None
    """Why a later row is preferred although this one could serve."""
    module: str = ""
    """Registers the callable when it is imported, which is when the row is first taken: Triton is optional."""

    def refusal(self, device: str, dtype: torch.dtype, facts: Facts) -> str | None:
        """Why this row cannot serve the request; None when it can."""
        if self.devices and device not in self.devices:
            return f"device {device}: only {', '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"dtype {dtype}: only {', '.join(str(d) for d in self.dtypes)}"
        return self.limits(facts) or self.refuse(facts)


@dataclass(frozen=True)
class Choice:
    """What `choose` decided: the implementation's name, its reason, and the reason of each row passed over."""

    op: str
    name: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {"op": self.op, "implementation": self.name, "reason": self.reason, "rejected": dict(self.rejected)}


def _kernel_refusal(facts: Facts) -> str | None:
    return no_triton(facts["target"], facts["dtype"])


def _triton(folder: str, why: str, limits: Callable[[Facts], str | None] = lambda facts: None) -> Implementation:
    return Implementation(
        "triton", why, devices=("cuda",), dtypes=KERNEL_DTYPES, refuse=_kernel_refusal, limits=limits,
        module=f"frugal.ops.{folder}.triton",
    )  # fmt: skip


def _norm_limits(facts: Facts) -> str | None:
    columns = facts.get("columns", 0)
    return (
        f"{columns} columns: the kernel holds rows of at most {MAX_NORM_COLUMNS}"
        if columns > MAX_NORM_COLUMNS
        else None
    )


def _loss_limits(facts: Facts) -> str | None:
    return facts.get("fp32_logits")


def _update_limits(facts: Facts) -> str | None:
    columns = facts.get("columns", 0)
    return f"{columns} columns are no multiple of 64" if columns % 64 else None


def _cpu_flash_refusal(facts: Facts) -> str | None:
    if facts.get("softcap") is not None:
        return "torch's CPU flash attention has no soft cap"
    if not facts.get("causal", True) and facts.get("window") is not None:
        return "a window without causality"
    return None


def _lora_refusal(facts: Facts) -> str | None:
    if facts.get("use_dora"):
        return "DoRA's norm term needs the merged weight: left to PEFT"
    return None


_REFERENCE = Implementation("reference", "plain and slow: the definition the others are compared with")
_TORCH = "autograd function that saves little; any device"

ROWS: dict[str, tuple[Implementation, ...]] = {
    "linear_cross_entropy": (
        _triton(
            "linear_cross_entropy",
            "chunks as in torch; loss and gradient of a chunk in one launch, in place, each logit read once",
            _loss_limits,
        ),
        Implementation("torch", "chunks of tokens, gradients taken chunk by chunk; never all logits"),
        _REFERENCE,
    ),
    "attention": (
        Implementation(
            "flash_attn",
            "flash-attn is installed: packed documents in one launch, tuned kernels",
            devices=("cuda",),
            dtypes=FLASH_DTYPES,
            refuse=flash_attn_refusal,
            yields=flash_attn_yields,
        ),
        Implementation(
            "triton",
            "packed documents in one launch, window and soft cap included",
            devices=("cuda",),
            dtypes=KERNEL_DTYPES,
            refuse=triton_refusal,
            yields=triton_yields,
        ),
        Implementation(
            "cpu_flash",
            "torch's CPU flash attention, by document; a window by blocks of rows",
            devices=("cpu",),
            refuse=_cpu_flash_refusal,
        ),
        Implementation(
            "sdpa",
            "the best scaled_dot_product_attention backend, document by document",
            devices=("cuda", "xpu", "mps", "cpu"),
            refuse=sdpa_refusal,
        ),
        Implementation("blockwise", "online softmax over blocks of keys, recomputed in backward; any device"),
        _REFERENCE,
    ),
    "lora_linear": (
        Implementation("torch", _TORCH, refuse=_lora_refusal),
        Implementation("reference", "plain linear plus low-rank update", refuse=_lora_refusal),
    ),
    "gated_mlp": (
        _triton("gated_mlp", "tiles as in torch; activation, product and their gradients fused and in place"),
        Implementation("torch", _TORCH),
        _REFERENCE,
    ),
    "rms_norm": (
        _triton("rms_norm", "one pass over the row", _norm_limits),
        Implementation("torch", _TORCH),
        _REFERENCE,
    ),
    "rope": (_triton("rope", "rotates q and k in one launch"), Implementation("torch", _TORCH), _REFERENCE),
    "nf4_rows": (
        _triton("weights", "codes and both levels of scales in one launch"),
        Implementation("torch", "bitsandbytes' kernel on GPUs, a table of value pairs on CPUs"),
    ),
    "nf4_rows_with_update": (
        _triton("weights", "codes, scales and the adapter's product in one launch", _update_limits),
        Implementation("torch", "rows of nf4_rows, then a product added in place"),
    ),
    "adam8bit": (
        _triton("adam8bit", "parameter, gradient, moments and scales in one launch; each moment gets its nearest code"),
        Implementation("bitsandbytes", "bitsandbytes' operation: the numbers of its optimizer", dtypes=KERNEL_DTYPES),
    ),
}
PARAMETER_OPS = ("adam8bit",)
"""Work on trained parameters, which are float32 whatever a run computes in."""


def choose(
    op: str,
    device: torch.device | str | Target,
    dtype: torch.dtype = torch.float32,
    *,
    named: str | None = None,
    **facts: Any,
) -> Choice:
    """The first row of ``op`` that accepts ``device``, ``dtype`` and ``facts`` (window, softcap, head_size, ...).

    ``device`` may be a `Target` that is not here. ``named``: this row or an error, whatever is preferred. Raises
    `UnsupportedError` when no row accepts and ``KeyError`` for an unknown operation.
    """
    target = device if isinstance(device, Target) else target_of(device)
    facts = {**facts, "target": target, "dtype": dtype}
    if named is not None:
        return _require(op, named, target, dtype, facts)
    rejected: dict[str, str] = {}
    for row in ROWS[op]:
        refusal = row.refusal(target.kind, dtype, facts) or row.yields(facts)
        if refusal is None:
            return Choice(op, row.name, row.why, rejected)
        rejected[row.name] = refusal
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected.items())
    raise UnsupportedError(f"{op} on {target.label} in {dtype} has no implementation here ({reasons})")


def _require(op: str, name: str, target: Target, dtype: torch.dtype, facts: Facts) -> Choice:
    for row in ROWS[op]:
        if row.name != name:
            continue
        refusal = row.refusal(target.kind, dtype, facts)
        if refusal is None:
            return Choice(op, name, f"asked for by name: {row.why}")
        others = [r.name for r in ROWS[op] if r.refusal(target.kind, dtype, facts) is None and r.name != "reference"]
        way_out = f" Here {', '.join(others)} can: `auto` takes the first." if others else ""
        raise UnsupportedError(f"{op}: {name} was asked for but cannot run here: {refusal}.{way_out}")
    raise UnsupportedError(f"{op} has no implementation {name!r}; there are {', '.join(r.name for r in ROWS[op])}.")


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
        target = like.device if planned is None else Target(planned.kind, planned.capability, simulated=True)
        found = _resolve(op, target, dtype, named, facts, fake=fake)
        _RESOLVED[key] = found
    if not fake:
        _record(found[1])
    return found


_RESOLVED: dict[Any, tuple[Callable[..., Any], Decision[str]]] = {}


def _resolve(
    op: str, device: torch.device | Target, dtype: torch.dtype, named: str | None, facts: Facts, *, fake: bool
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
    return _form(op, choice.name, fake=fake), Decision(op, choice.name, choice.reason, {**rejected, **choice.rejected})


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
