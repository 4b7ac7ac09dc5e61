"""The attention module that `frugal.models.replace_modules` puts in: projections as they are, q and k rotated in place.

transformers' attention modules rotate out of place: four temporaries of q's size forward and as many backward, and the
unrotated q and k live as long as the forward does. Nothing else of the module changes: the same children, the same
call of the attention function that the configuration names, and with a cache the module's own forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from frugal.ops import rope_joint, rope_pair

SPLIT, JOINT, OUT = ("q_proj", "k_proj", "v_proj"), "qkv_proj", "o_proj"
NORMS = ("q_norm", "k_norm")


class FrugalAttention(nn.Module):
    """To be mixed in before the class of the module it replaces (`over`), which stays the fallback.

    Works where the family's forward is: project, normalise q and k (per head or whole, or not), rotate (or not),
    attend, project. `frugal.models.replace_attention` proves it for each module.
    """

    config: Any
    head_dim: int
    scaling: float
    attention_dropout: float
    frugal_norms: str
    """"none", "heads" (q_norm and k_norm over a head) or "whole" (over all heads)."""
    frugal_rotates: bool
    frugal_extra: dict[str, Any]
    """What the family passes to the attention function besides dropout and scaling."""

    @staticmethod
    def over(old: nn.Module, *, norms: str, rotates: bool, extra: dict[str, Any]) -> FrugalAttention:
        """A module with ``old``'s children and state (shared, not copied), still an instance of its class."""
        mixed = _mixed(type(old))
        new: FrugalAttention = mixed.__new__(mixed)
        new.__dict__.update(old.__dict__)
        new.frugal_norms, new.frugal_rotates, new.frugal_extra = norms, rotates, extra
        return new

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """hidden_states [batch, tokens, hidden_size] -> (the same, whatever the attention function returns beside)."""
        caches = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        pair = isinstance(position_embeddings, tuple) and len(position_embeddings) == 2
        eager = self.config._attn_implementation in (None, "eager")  # the family's own function, in its own file
        cached = any(cache is not None for cache in caches)
        if args or cached or not pair or eager or kwargs.get("output_attentions") or self._watched():
            if caches[1] is not None:
                kwargs["past_key_values"] = caches[1]
            elif caches[0] is not None:
                kwargs["cache"] = caches[0]
            return super().forward(hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        shape = hidden_states.shape[:-1]
        cos, sin = (t[..., : t.shape[-1] // 2] for t in position_embeddings)
        take = self._joint if JOINT in self._modules else self._split
        q, k, v = take(hidden_states, cos, sin)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        out, weights = attend(
            self, q, k, v, attention_mask,
            dropout=self.attention_dropout if self.training else 0.0, scaling=self.scaling, **self.frugal_extra,
            **kwargs,
        )  # fmt: skip
        del q, k, v
        return self.get_submodule(OUT)(out.reshape(*shape, -1).contiguous()), weights

    def _watched(self) -> bool:
        """Whether hooks may keep what a projection or norm returned, which would be overwritten."""
        found = (self._modules.get(name) for name in (*SPLIT, JOINT, *NORMS))
        return any(bool(module._forward_hooks) for module in found if module is not None)

    def _split(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [batch, heads, tokens, head_dim] of projections of their own, normalised and rotated."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (self.get_submodule(name)(hidden_states) for name in SPLIT)
        if self.frugal_norms == "whole":
            q, k = (self.get_submodule(name)(t) for name, t in zip(NORMS, (q, k), strict=True))
        q, k, v = (t.view(shape) for t in (q, k, v))
        if self.frugal_norms == "heads":
            q, k = (self.get_submodule(name)(t) for name, t in zip(NORMS, (q, k), strict=True))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.frugal_rotates:
            q, k = rope_pair(q, k, cos, sin)
        return q, k, v

    def _joint(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of one projection: views of what it returned."""
        both = self.get_submodule(JOINT)(hidden_states)
        heads = self.config.num_attention_heads
        groups = (both.shape[-1] // self.head_dim - heads) // 2
        rows = both.view(*both.shape[:-1], -1, self.head_dim).transpose(1, 2)
        if self.frugal_rotates:
            rows = rope_joint(rows, heads + groups, cos, sin)
        q, k, v = rows.split([heads, groups, groups], dim=1)
        return q, k, v


_MIXED: dict[type, type[FrugalAttention]] = {}


def _mixed(stock: type) -> type[FrugalAttention]:
    """A class that is both: transformers looks for attention modules by their class (to record what they return)."""
    if stock not in _MIXED:
        own = FrugalAttention
        _MIXED[stock] = type(own.__name__, (own, stock), {"__doc__": own.__doc__, "__module__": own.__module__})
    return _MIXED[stock]
