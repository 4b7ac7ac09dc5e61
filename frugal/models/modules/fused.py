"""The modules that `replace_modules` puts in: same children, same parameter names, frugal operations inside.

Every forward reads adapters anew and falls back to the ordinary modules where the operations do not apply (several
adapters with dropout, DoRA, hooks on inner layers): PEFT may switch, disable, merge or add adapters at any time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from frugal.adapters.peft_model import EncodedLoraLinear
from frugal.models.lora_layers import lora_weights, one_adapter
from frugal.ops import Projection, gated_mlp, lora_linear, rms_norm
from frugal.ops.gated_mlp import Activation


class FrugalLoraLinear(EncodedLoraLinear):
    """PEFT's LoRA layer with the fused product. Still PEFT's layer: merging, switching and saving work as before."""

    @classmethod
    def over(cls, old: LoraLinear) -> FrugalLoraLinear:
        """A layer with ``old``'s children and state (shared, not copied)."""
        new = cls.__new__(cls)
        new.__dict__.update(old.__dict__)
        return new

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        parts = lora_weights(self, hooks_run=True)
        if args or any(v is not None for v in kwargs.values()) or isinstance(parts, str):
            out: Tensor = super().forward(x, *args, **kwargs)
            return out
        dropout = max((adapter.dropout for adapter in parts.adapters), default=0.0)
        if dropout and len(parts.adapters) > 1:  # each draws its own mask
            out = super().forward(x)
            return out
        return lora_linear(x, parts.weight, bias=parts.bias, lora=one_adapter(parts.adapters), dropout=dropout)


class FrugalGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) in tiles of tokens. Children keep the names of the MLP it replaces."""

    def __init__(
        self, old: nn.Module, gate_up: tuple[str, ...], down: str, activation: Activation, tile_tokens: int | None
    ) -> None:
        super().__init__()
        for name, child in old.named_children():
            self.add_module(name, child)
        self.gate_up_names, self.down_name = gate_up, down
        self.activation: Activation = activation
        self.tile_tokens = tile_tokens
        self.train(old.training)

    def projections(self) -> tuple[tuple[Projection, ...], Projection] | str:
        """What the operation works on now, or why it cannot."""
        found: list[Projection] = []
        for name in (*self.gate_up_names, self.down_name):
            parts = lora_weights(self.get_submodule(name))
            if isinstance(parts, str):
                return f"{name}: {parts}"
            if any(adapter.dropout for adapter in parts.adapters):
                return f"{name}: adapter dropout"
            found.append(Projection(parts.weight, parts.bias, one_adapter(parts.adapters)))
        return tuple(found[:-1]), found[-1]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> [..., hidden_size]."""
        now = self.projections()
        if not isinstance(now, str):
            return gated_mlp(x, now[0], now[1], activation=self.activation, tile_tokens=self.tile_tokens)
        halves = [self.get_submodule(name)(x) for name in self.gate_up_names]
        gate, up = halves if len(halves) == 2 else halves[0].chunk(2, dim=-1)
        out: Tensor = self.get_submodule(self.down_name)(activate(gate, self.activation) * up)
        return out

    def extra_repr(self) -> str:
        """Shown in the model's printout."""
        return f"activation={self.activation}, tile_tokens={self.tile_tokens or 'by size'}"


class FrugalRMSNorm(nn.Module):
    """RMSNorm that keeps its input and one number a row."""

    weight: nn.Parameter | None

    def __init__(self, old: nn.Module, eps: float, offset: float) -> None:
        super().__init__()
        self.register_parameter("weight", getattr(old, "weight", None))
        self.eps = self.variance_epsilon = eps
        self.offset = offset
        self.train(old.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden_size], same shape and dtype out."""
        return rms_norm(hidden_states, self.weight, self.eps, offset=self.offset)

    def extra_repr(self) -> str:
        """Shown in the model's printout."""
        size = "no weight" if self.weight is None else str(tuple(self.weight.shape))
        return f"{size}, eps={self.eps}, offset={self.offset:g}"


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activations that `gated_mlp` knows."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def known_activation(function: Any) -> Activation | None:
    """Which of them a module or function is, found by its values."""
    x = torch.linspace(-6, 6, 101)
    try:
        with torch.no_grad():
            y = function(x)
    except (TypeError, RuntimeError):
        return None
    names: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    return next((name for name in names if torch.allclose(y, activate(x, name), rtol=0, atol=1e-6)), None)
