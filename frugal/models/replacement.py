"""Explicit replacement of modules by frugal ones, by proof.

Candidates are found by structure, never by a list of model names. Each candidate is built over the children of the
module it would replace and compared with it on random input of the model's width: output, gradient of the input
and gradients of every trained parameter. Within tolerance it goes in through ``set_submodule``; otherwise the old
module stays and the report says why. Parameter names do not change, so checkpoints and PEFT keep their keys.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from frugal.adapters.peft_model import EncodedLoraLinear
from frugal.model_structure import input_device, inside
from frugal.models.equivalence import CANNOT_RUN, DOES_NOT_FIT, mismatch
from frugal.models.lora_layers import lora_weights
from frugal.models.modules.attention import FrugalAttention, attention_candidate, attention_mismatch
from frugal.models.modules.experts import FrugalExperts, experts_candidate
from frugal.models.modules.fused import FrugalGatedMLP, FrugalLoraLinear, FrugalRMSNorm, known_activation

_DOWN = "down_proj"
_LAYOUTS = (("gate_proj", "up_proj"), ("gate_up_proj",))
_EPS_NAMES = ("variance_epsilon", "eps")
Candidate = nn.Module | str  # a replacement to prove, or the reason why there is none


@dataclass(frozen=True)
class Replacement:
    """One module: what it was, what it became (None: left alone) and why."""

    name: str
    was: str
    became: str | None
    reason: str


@dataclass
class ReplacementReport:
    """All modules that were candidates, in the order they were looked at."""

    rows: list[Replacement] = field(default_factory=list)

    def add(self, name: str, old: nn.Module, new: nn.Module | None, reason: str) -> None:
        """Note one decision."""
        self.rows.append(Replacement(name, type(old).__name__, None if new is None else type(new).__name__, reason))

    def extend(self, other: ReplacementReport) -> None:
        """Add the decisions of another part of the same model."""
        self.rows.extend(other.rows)

    @property
    def replaced(self) -> list[Replacement]:
        """Modules that were replaced."""
        return [row for row in self.rows if row.became is not None]

    @property
    def kept(self) -> list[Replacement]:
        """Modules that stayed, each with its reason."""
        return [row for row in self.rows if row.became is None]

    def common_failure(self) -> str | None:
        """What every replacement that was tried raised, when all of them did: a fault of the machine, not of modules.

        None when one was replaced, or failures differ.
        """
        raised = {row.reason for row in self.rows if row.reason.startswith(DOES_NOT_FIT)}
        if self.replaced or len(raised) != 1 or len({row.was for row in self.rows if row.reason in raised}) < 2:
            return None
        return raised.pop().removeprefix(DOES_NOT_FIT)

    def groups(self) -> list[tuple[Replacement, int]]:
        """Rows that differ in layer numbers only, joined: (row with ``*`` for numbers, how many)."""
        counts: dict[Replacement, int] = {}
        for row in self.rows:
            pattern = Replacement(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.name), row.was, row.became, row.reason)
            counts[pattern] = counts.get(pattern, 0) + 1
        return list(counts.items())

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values for the manifest."""
        return [
            {"modules": row.name, "count": count, "was": row.was, "became": row.became, "reason": row.reason}
            for row, count in self.groups()
        ]

    def __str__(self) -> str:
        if not self.rows:
            return "no module was a candidate for replacement"
        lines = [
            (f"{count:4d} x {row.name}", f"{row.was} -> {row.became or 'left alone'}", row.reason)
            for row, count in self.groups()
        ]
        first, second = (max(len(line[i]) for line in lines) for i in (0, 1))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in lines)


def replace_modules(
    model: nn.Module,
    *,
    compute_dtype: torch.dtype | None = None,
    mlp_tile_tokens: int | None = None,
    prove: bool = True,
    only: str | None = None,
    leave: Collection[str] = (),
) -> ReplacementReport:
    """Replace what can be proven equal in ``model`` (plain or wrapped by PEFT) and report on every module looked at.

    ``only`` is the name of a module: nothing outside it is looked at. ``leave`` names modules that are not looked at,
    nor what is inside them (they were, or are sharded already).

    ``compute_dtype`` is the dtype of hidden states in training (default: float32 on CPUs, else the embedding's).
    ``mlp_tile_tokens`` bounds a tile of the MLP; unset, by size. ``prove=False`` is for models without memory, which
    have no numbers to compare: what has the right structure is replaced. Running it twice changes nothing the second
    time.
    """
    report = ReplacementReport()
    dtype = compute_dtype or _compute_dtype(model)
    makers: tuple[Callable[[nn.Module], Candidate | None], ...] = (
        _lora_candidate,
        lambda module: _mlp_candidate(module, mlp_tile_tokens),
        lambda module: _norm_candidate(module, prove),
        attention_candidate,
        experts_candidate,
    )
    # Layers first, so that an MLP or attention is proven over the layers it will have.
    for make in makers:
        for name, module in list(model.get_submodule(only or "").named_modules(prefix=only or "")):
            candidate = None if inside(name, leave) else make(module)
            if candidate is None:
                continue
            if isinstance(candidate, str):
                report.add(name, module, None, candidate)
                continue
            failure = _obstacle(name, module)
            if failure is None and prove and not isinstance(candidate, FrugalExperts):  # those were, on a miniature
                if isinstance(candidate, FrugalAttention):
                    failure = attention_mismatch(module, candidate, dtype)
                else:
                    failure = mismatch(module, candidate, _width(candidate), dtype)
            if failure is None:
                model.set_submodule(name, candidate)
                report.add(name, module, candidate, "equal on random input" if prove else "by structure, not proven")
            else:
                report.add(name, module, None, failure)
    return report


def _compute_dtype(model: Any) -> torch.dtype:
    weight: Tensor = model.get_input_embeddings().weight
    return torch.float32 if input_device(model).type == "cpu" else weight.dtype


def _lora_candidate(module: nn.Module) -> Candidate | None:
    if not isinstance(module, LoraLayer) or isinstance(module, FrugalLoraLinear):
        return None
    if type(module) not in (LoraLinear, EncodedLoraLinear):
        return f"{type(module).__module__}.{type(module).__name__} is left to PEFT"
    parts = lora_weights(module, hooks_run=True)
    return parts if isinstance(parts, str) else FrugalLoraLinear.over(module)


def _mlp_candidate(module: nn.Module, tile_tokens: int | None) -> Candidate | None:
    children = dict(module.named_children())
    layout = next((names for names in _LAYOUTS if {*names, _DOWN} <= children.keys()), None)
    if layout is None or isinstance(module, FrugalGatedMLP):
        return None
    own: list[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    others = {n: c for n, c in children.items() if n not in (*layout, _DOWN)}
    if own:
        return "the MLP has parameters of its own"
    if further := _further_arguments(module):
        return further
    functions = [c for c in others.values() if not list(c.parameters())]
    if len(functions) != len(others):
        return f"the MLP has further layers: {', '.join(n for n, c in others.items() if c not in functions)}"
    function = next((getattr(module, n) for n in ("act_fn", "activation_fn") if hasattr(module, n)), None)
    activation = known_activation(function)
    if activation is None:
        return f"activation {type(function).__name__} is none of silu, gelu, gelu_tanh"
    for name in (*layout, _DOWN):
        parts = lora_weights(children[name])
        if isinstance(parts, str):
            return f"{name}: {parts}"
    return FrugalGatedMLP(module, layout, _DOWN, activation, tile_tokens)


def _norm_candidate(module: nn.Module, prove: bool) -> Candidate | None:
    eps = next((getattr(module, n) for n in _EPS_NAMES if isinstance(getattr(module, n, None), float)), None)
    own = dict(module.named_parameters(recurse=False))
    if eps is None or isinstance(module, FrugalRMSNorm | nn.LayerNorm) or list(module.children()):
        return None
    if "Norm" not in type(module).__name__:
        return None
    if set(own) != {"weight"} or own["weight"].dim() != 1:
        return f"{type(module).__name__} has parameters {sorted(own)}: only one weight vector is known"
    if further := _further_arguments(module):
        return further
    if not prove:
        return FrugalRMSNorm(module, eps, 0.0)
    # Gemma stores weight - 1: let the module itself say which it is.
    probe = torch.linspace(-1, 1, own["weight"].shape[0], device=own["weight"].device, dtype=own["weight"].dtype)
    with torch.no_grad():
        want = module(probe[None])
        for offset in (0.0, 1.0):
            candidate = FrugalRMSNorm(module, eps, offset)
            try:
                got = candidate(probe[None])
            except CANNOT_RUN as failure:
                return f"{DOES_NOT_FIT}{failure}"
            if float((got - want).abs().max()) <= 1e-2 * float(want.abs().max()):
                return candidate
    return f"{type(module).__name__} is no RMSNorm with weight or 1 + weight"


def _further_arguments(module: nn.Module) -> str | None:
    """Why a proof with one input says too little: a model may call the module with more (a gated norm's gate)."""
    takes = list(inspect.signature(module.forward).parameters)[1:]
    return f"{type(module).__name__} also takes {', '.join(takes)}, which is not proven" if takes else None


def _obstacle(name: str, module: nn.Module) -> str | None:
    if ".modules_to_save." in name or ".original_module" in name:
        return "a copy that PEFT keeps of a module trained whole"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or hasattr(module, "_hf_hook"):
        return "the module has hooks"
    return None


def _width(candidate: nn.Module) -> int:
    """Features of the input."""
    if isinstance(candidate, FrugalRMSNorm) and candidate.weight is not None:
        return int(candidate.weight.shape[0])
    linear = candidate
    if isinstance(candidate, FrugalGatedMLP):
        linear = candidate.get_submodule(candidate.gate_up_names[0])
    parts = lora_weights(linear, hooks_run=True)
    if isinstance(parts, str):
        raise RuntimeError(parts)
    return int(parts.weight.shape[1])
