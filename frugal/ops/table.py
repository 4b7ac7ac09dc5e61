"""One table of operations: which implementation serves which device, dtype and shape, and why the others do not.

`choose` walks the rows from the best to the plainest, keeps the reason of each refusal and returns the first row that
accepts. The manifest prints the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from frugal.errors import UnsupportedError

Facts = Mapping[str, Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ANY_DEVICE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Implementation:
    """One row: an implementation of one operation and what it can do."""

    name: str
    why: str
    devices: tuple[str, ...] = ANY_DEVICE
    dtypes: tuple[torch.dtype, ...] = FLOATS
    refuse: Callable[[Facts], str | None] = lambda facts: None

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


def _no_kernel_yet(facts: Facts) -> str | None:
    return "no Triton kernel in this version"


def _triton(why: str) -> Implementation:
    return Implementation("triton", why, devices=("cuda",), refuse=_no_kernel_yet)


def _cpu_flash_refusal(facts: Facts) -> str | None:
    if facts.get("softcap") is not None:
        return "torch's CPU flash attention has no soft cap"
    if not facts.get("causal", True) and facts.get("window") is not None:
        return "a window without causality"
    return None


def _sdpa_refusal(facts: Facts) -> str | None:
    if facts.get("softcap") is not None:
        return "scaled_dot_product_attention has no soft cap"
    if facts.get("window") is not None:
        return "scaled_dot_product_attention has no window without an [S, S] mask"
    return None


def _lora_refusal(facts: Facts) -> str | None:
    if facts.get("use_dora"):
        return "DoRA's norm term needs the merged weight: left to PEFT"
    return None


_REFERENCE = Implementation("reference", "plain and slow: the definition the others are compared with")
_TORCH = "autograd function that saves little; any device"

ROWS: dict[str, tuple[Implementation, ...]] = {
    "linear_cross_entropy": (
        _triton("logits never leave the chip"),
        Implementation("torch", "chunks of tokens, gradients taken chunk by chunk; never all logits"),
        _REFERENCE,
    ),
    "attention": (
        _triton("packed documents in one launch"),
        Implementation(
            "cpu_flash",
            "torch's CPU flash attention, by document; a window by blocks of rows",
            devices=("cpu",),
            refuse=_cpu_flash_refusal,
        ),
        Implementation(
            "sdpa",
            "the best scaled_dot_product_attention backend, document by document",
            devices=("cuda", "xpu", "mps"),
            refuse=_sdpa_refusal,
        ),
        Implementation("blockwise", "online softmax over blocks of keys, recomputed in backward; any device"),
        _REFERENCE,
    ),
    "lora_linear": (
        _triton("dequantises NF4 on the way into the product"),
        Implementation("torch", _TORCH, refuse=_lora_refusal),
        Implementation("reference", "plain linear plus low-rank update", refuse=_lora_refusal),
    ),
    "gated_mlp": (_triton("activation and product fused"), Implementation("torch", _TORCH), _REFERENCE),
    "rms_norm": (_triton("one pass over the row"), Implementation("torch", _TORCH), _REFERENCE),
    "layer_norm": (_triton("one pass over the row"), Implementation("torch", _TORCH), _REFERENCE),
    "rope": (_triton("rotates q and k in one launch"), Implementation("torch", _TORCH), _REFERENCE),
}


def choose(op: str, device: torch.device | str, dtype: torch.dtype = torch.float32, **facts: Any) -> Choice:
    """The first row of ``op`` that accepts ``device``, ``dtype`` and ``facts`` (window, softcap, use_dora, ...).

    Raises `UnsupportedError` when no row accepts (DoRA in `lora_linear`) and ``KeyError`` for an unknown operation.
    """
    kind = torch.device(device).type
    rejected: dict[str, str] = {}
    for row in ROWS[op]:
        refusal = row.refusal(kind, dtype, facts)
        if refusal is None:
            return Choice(op, row.name, row.why, rejected)
        rejected[row.name] = refusal
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected.items())
    raise UnsupportedError(f"{op} on {kind} in {dtype} has no implementation here ({reasons})")
