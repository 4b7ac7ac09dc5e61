"""One table of operations: which implementation serves which device, dtype and shape, and why the others do not.

`choose` walks the rows from the best to the plainest, keeps the reason of each refusal and returns the first row that
accepts. A row may also stand back for a plainer one that serves a request better; asked for by name (`require`) it does
not. The manifest prints the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from frugal.errors import UnsupportedError
from frugal.ops.attention_choice import (
    FLASH_DTYPES,
    flash_attn_refusal,
    flash_attn_yields,
    sdpa_refusal,
    triton_refusal,
    triton_yields,
)
from frugal.ops.target import Target, no_triton, target_of

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
    yields: Callable[[Facts], str | None] = lambda facts: None
    """Why a later row is preferred although this one could serve."""

    def refusal(self, device: str, dtype: torch.dtype, facts: Facts) -> str | None:
        """Why this row cannot serve the request; None when it can."""
        if self.devices and device not in self.devices:
            return f"device {device}: only {', '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"dtype {dtype}: only {', '.join(str(d) for d in self.dtypes)}"
        return self.refuse(facts)


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


def _torch_is_fused(facts: Facts) -> str | None:
    return (
        "torch's LayerNorm is one fused kernel that reads a row once and keeps the row, its mean and 1 / std: there is "
        "nothing to save, and models keep their nn.LayerNorm"
    )


def _kernel_refusal(facts: Facts) -> str | None:
    return no_triton(facts["target"], facts["dtype"])


def _triton(why: str, refuse: Callable[[Facts], str | None] = _kernel_refusal) -> Implementation:
    return Implementation("triton", why, devices=("cuda",), dtypes=KERNEL_DTYPES, refuse=refuse)


def _products_elsewhere(facts: Facts) -> str | None:
    return "products are the vendor's library; NF4 rows come from a kernel (nf4_rows)"


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
        _triton("chunks as in torch; loss and gradient of a chunk in one launch, in place, each logit read once"),
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
        _triton("products by our own kernel", _products_elsewhere),
        Implementation("torch", _TORCH, refuse=_lora_refusal),
        Implementation("reference", "plain linear plus low-rank update", refuse=_lora_refusal),
    ),
    "gated_mlp": (
        _triton("tiles as in torch; activation, product and their gradients fused and in place"),
        Implementation("torch", _TORCH),
        _REFERENCE,
    ),
    "rms_norm": (_triton("one pass over the row"), Implementation("torch", _TORCH), _REFERENCE),
    "layer_norm": (
        _triton("one pass over the row", _torch_is_fused),
        Implementation("torch", "torch's own fused kernel; any device"),
        _REFERENCE,
    ),
    "rope": (_triton("rotates q and k in one launch"), Implementation("torch", _TORCH), _REFERENCE),
    "nf4_rows": (
        _triton("codes and both levels of scales in one launch"),
        Implementation("torch", "bitsandbytes' kernel on GPUs, a table of value pairs on CPUs"),
    ),
    "adam8bit": (
        _triton("parameter, gradient, moments and scales in one launch; each moment gets its nearest code"),
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
