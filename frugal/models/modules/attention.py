"""The attention module that `frugal.models.replacement` puts in: projections as they are, q and k rotated in place.

transformers' attention modules rotate out of place: four temporaries of q's size forward and as many backward, and the
unrotated q and k live as long as the forward does. Nothing else of the module changes: the same children, the same
call of the attention function that the configuration names, and with a cache the module's own forward.

Which modules may be replaced is found by structure (`attention_candidate`) and proven on what they hand to attention
(`attention_mismatch`): both modules are run with an attention function that notes what it is given, so that queries,
keys, values and settings (scale, window, soft cap) are compared one by one besides output and gradients; at large
inputs too, where clipping would show, and at far positions, where a scale that grows with the position would.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from frugal.models.equivalence import difference, mismatch, tolerance
from frugal.ops import attention_reference, rope_joint, rope_pair

SPLIT, JOINT, OUT = ("q_proj", "k_proj", "v_proj"), "qkv_proj", "o_proj"
NORMS = ("q_norm", "k_norm")

_PROOF = "frugal_proof"
_LARGE = 300.0
_FAR = 10_000_000
_ATTRIBUTES: dict[str, tuple[type, ...]] = {"head_dim": (int,), "scaling": (float,), "attention_dropout": (float, int)}


class FrugalAttention(nn.Module):
    """To be mixed in before the class of the module it replaces (`over`), which stays the fallback.

    Works where the family's forward is: project, normalise q and k (per head or whole, or not), rotate (or not),
    attend, project. `attention_mismatch` proves it for each module.
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


def attention_candidate(module: nn.Module) -> FrugalAttention | str | None:
    """A replacement to prove, the reason why there is none, or None where the module is no such attention."""
    children = dict(module.named_children())
    layout = next((names for names in (SPLIT, (JOINT,)) if {*names, OUT} <= children.keys()), None)
    if layout is None or isinstance(module, FrugalAttention):
        return None
    own = [n for n, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
    if own:
        return f"the attention has parameters of its own: {', '.join(own)}"
    further = [n for n, c in children.items() if n not in (*layout, OUT, *NORMS) and list(c.parameters())]
    if further:
        return f"the attention has further layers: {', '.join(further)}"
    missing = [n for n, kind in _ATTRIBUTES.items() if not isinstance(getattr(module, n, None), kind)]
    config = getattr(module, "config", None)
    if missing or config is None:
        return f"the attention has no {', '.join(missing) or 'config'}"
    norms = _norms(children, module.head_dim, layout)  # type: ignore[arg-type]
    if norms not in ("none", "heads", "whole"):
        return norms
    extra: dict[str, Any] = {}
    for owner in (module, config):
        if hasattr(owner, "sliding_window"):
            extra["sliding_window"] = owner.sliding_window
            break
    if getattr(module, "attn_logit_softcapping", None) is not None:
        extra["softcap"] = module.attn_logit_softcapping
    return FrugalAttention.over(module, norms=norms, rotates=bool(getattr(module, "use_rope", True)), extra=extra)


def _norms(children: dict[str, nn.Module], head_dim: int, layout: tuple[str, ...]) -> str:
    """What q and k are normalised over, or the reason why that is not known."""
    weights = [getattr(children.get(name), "weight", None) for name in NORMS]
    if all(name not in children for name in NORMS):
        return "none"
    if layout != SPLIT or not all(isinstance(w, Tensor) and w.dim() == 1 for w in weights):
        return "the norms of q and k are not known: one weight vector each expected, after projections of their own"
    sizes = [w.numel() for w in weights if isinstance(w, Tensor)]
    if sizes == [head_dim, head_dim]:
        return "heads"
    if sizes == [_features(children[name], "out_features") for name in SPLIT[:2]]:
        return "whole"
    return f"the norms of q and k are over {sizes} numbers, a head has {head_dim}"


def _features(module: nn.Module, name: str) -> int | None:
    """in_features or out_features of a linear layer, PEFT's wrappers included."""
    value = getattr(module, name, None)
    inner = getattr(module, "original_module", None)
    return value if isinstance(value, int) else None if inner is None else _features(inner, name)


def attention_mismatch(old: nn.Module, new: FrugalAttention, dtype: torch.dtype) -> str | None:
    """Why ``new`` must not replace ``old``; None when everything agrees. See the module's text."""
    names = SPLIT if SPLIT[0] in dict(old.named_children()) else (JOINT,)
    width = _features(old.get_submodule(names[0]), "in_features")
    if width is None:
        return f"the width of {names[0]} is not known"
    failure = None
    for rotary in _rotary_sizes(new):
        failure = _mismatch(old, new, width, rotary, dtype)
        if failure is None:
            return None
    return failure


def _rotary_sizes(module: FrugalAttention) -> list[int]:
    """Widths of cos and sin to try: what the configuration says, then whole heads."""
    rope = getattr(module.config, "rope_parameters", None)
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = share or getattr(module.config, "partial_rotary_factor", None) or 1.0
    return list(dict.fromkeys([int(module.head_dim * share) // 2 * 2, module.head_dim]))


def _mismatch(old: nn.Module, new: FrugalAttention, width: int, rotary: int, dtype: torch.dtype) -> str | None:
    for scale in (1.0, _LARGE):
        with _recording(old, new) as seen:

            def call(module: nn.Module, x: Tensor) -> Tensor:
                angle = torch.rand(1, x.shape[1], rotary // 2, generator=torch.Generator().manual_seed(2)) * 6
                pair = tuple(torch.cat([t, t], -1).to(x.device, x.dtype) for t in (angle.cos(), angle.sin()))
                far = torch.arange(_FAR, _FAR + x.shape[1], device=x.device)[None]
                out: Tensor = module(x, position_embeddings=pair, attention_mask=None, position_ids=far)[0]
                return out

            # At a large scale what goes in is compared alone: its softmax is one hot, and which one a rounding decides.
            failure = mismatch(old, new, width, dtype, call=call, scale=scale)
            if scale == 1.0 and failure is not None:
                return failure
            if len(seen) != 2:
                return failure or "the attention function was not called once by each"
            (stock, stock_tensors), (ours, our_tensors) = seen
        if stock != ours:
            apart = sorted(name for name in {*stock, *ours} if stock.get(name) != ours.get(name))
            return f"other settings of attention: {', '.join(apart)}"
        failure = difference(stock_tensors, our_tensors, tolerance(dtype))
        if failure is not None:
            return failure
    return None


@contextmanager
def _recording(*modules: nn.Module) -> Iterator[list[tuple[dict[str, Any], dict[str, Tensor]]]]:
    """Give ``modules`` an attention function that notes (settings that are not None, q, k and v) of each call.

    Each gets a copy of its configuration meanwhile: the model's own is shared by all its layers.
    """
    seen: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **settings: Any) -> tuple[Tensor, None]:
        settings.pop("position_ids", None)
        plain = {name: value for name, value in settings.items() if value is not None}
        seen.append((plain, {name: t.detach().clone() for name, t in (("q", q), ("k", k), ("v", v))}))
        return attention_reference(q, k, v, scale=settings.get("scaling")).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_PROOF, attend)
    configs: list[Any] = [module.config for module in modules]
    try:
        for module, config in zip(modules, configs, strict=True):
            own = copy.copy(config)
            own._attn_implementation = {"": _PROOF}
            module.config = own
        yield seen
    finally:
        for module, config in zip(modules, configs, strict=True):
            module.config = config
