"""Which implementation each operation of a run uses, decided once from the device, before anything is loaded."""

from __future__ import annotations

from typing import Any

import torch

from frugal.errors import UnsupportedError
from frugal.ops.registry import PARAMETER_OPS, ROWS, Choice, choose
from frugal.ops.target import Target, target_of

AUTO = "auto"
MATRIX_PRODUCTS = "matrix products"


def choices(
    device: torch.device | str | Target,
    dtype: torch.dtype,
    *,
    attention: str = AUTO,
    head_size: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    use_dora: bool = False,
) -> list[Choice]:
    """One `Choice` for each operation of the table, and one for matrix products. What no row can do is named "peft".

    Raises `UnsupportedError` when ``attention`` names what the device cannot run.
    """
    target = device if isinstance(device, Target) else target_of(device)
    found = [Choice(MATRIX_PRODUCTS, *matrix_products(target))]
    for op in ROWS:
        facts: dict[str, Any] = {}
        if op == "attention":
            facts = {"head_size": head_size, "window": window, "softcap": softcap}
            facts["named"] = None if attention == AUTO else attention
        elif op == "lora_linear":
            facts = {"use_dora": use_dora}
        try:
            found.append(choose(op, target, torch.float32 if op in PARAMETER_OPS else dtype, **facts))
        except UnsupportedError as refusal:
            if op == "attention":
                raise
            found.append(Choice(op, "peft", str(refusal)))
    return found


def check_attention(device: torch.device | str | Target, dtype: torch.dtype, attention: str) -> None:
    """Raise `UnsupportedError` when ``attention`` (`memory.attention`) names what the device cannot run at all.

    Heads, window and soft cap are the model's and are looked at when it is loaded. Call this before any download.
    """
    if attention != AUTO:
        choose("attention", device, dtype, named=attention)


def matrix_products(target: Target) -> tuple[str, str]:
    """(implementation, why): products of whole matrices are always the vendor's library."""
    if target.kind == "cuda" and not target.amd:
        if target.older_than((8, 0)):
            return "cuBLAS", f"Triton has no tensor-core path on {target.label}"
        return "cuBLAS", "nothing that Triton makes of a plain product is faster"
    return "torch", f"the library that torch uses on {target.label}"
