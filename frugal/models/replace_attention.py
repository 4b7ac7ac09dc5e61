"""Which attention modules `FrugalAttention` may replace: found by structure, proven on what they hand to attention.

Both modules are run with an attention function that notes what it is given, so that queries, keys, values and settings
(scale, window, soft cap) are compared one by one besides output and gradients; at large inputs too, where clipping
would show, and at far positions, where a scale that grows with the position would.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from frugal.models.equivalence import difference, disproof, tolerance
from frugal.models.fused_attention import JOINT, NORMS, OUT, SPLIT, FrugalAttention
from frugal.ops import attention_reference

_PROOF = "frugal_proof"
_LARGE = 300.0
_FAR = 10_000_000
_ATTRIBUTES: dict[str, tuple[type, ...]] = {"head_dim": (int,), "scaling": (float,), "attention_dropout": (float, int)}


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


def attention_disproof(old: nn.Module, new: FrugalAttention, dtype: torch.dtype) -> str | None:
    """Why ``new`` must not replace ``old``; None when everything agrees. See the module's text."""
    names = SPLIT if SPLIT[0] in dict(old.named_children()) else (JOINT,)
    width = _features(old.get_submodule(names[0]), "in_features")
    if width is None:
        return f"the width of {names[0]} is not known"
    failure = None
    for rotary in _rotary_sizes(new):
        failure = _disproof(old, new, width, rotary, dtype)
        if failure is None:
            return None
    return failure


def _rotary_sizes(module: FrugalAttention) -> list[int]:
    """Widths of cos and sin to try: what the configuration says, then whole heads."""
    rope = getattr(module.config, "rope_parameters", None)
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = share or getattr(module.config, "partial_rotary_factor", None) or 1.0
    return list(dict.fromkeys([int(module.head_dim * share) // 2 * 2, module.head_dim]))


def _disproof(old: nn.Module, new: FrugalAttention, width: int, rotary: int, dtype: torch.dtype) -> str | None:
    for scale in (1.0, _LARGE):
        with _recording(old, new) as seen:

            def call(module: nn.Module, x: Tensor) -> Tensor:
                angle = torch.rand(1, x.shape[1], rotary // 2, generator=torch.Generator().manual_seed(2)) * 6
                pair = tuple(torch.cat([t, t], -1).to(x.device, x.dtype) for t in (angle.cos(), angle.sin()))
                far = torch.arange(_FAR, _FAR + x.shape[1], device=x.device)[None]
                out: Tensor = module(x, position_embeddings=pair, attention_mask=None, position_ids=far)[0]
                return out

            # At a large scale what goes in is compared alone: its softmax is one hot, and which one a rounding decides.
            failure = disproof(old, new, width, dtype, call=call, scale=scale)
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
