"""The flash-attn package's packed attention, where the user has installed it. It is not a dependency."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Segment = tuple[int, int, int, int]


@functools.cache
def load() -> tuple[Callable[..., Tensor] | None, str]:
    """(flash_attn_varlen_func, "") or (None, why not). A broken installation is a reason, not a failure."""
    if importlib.util.find_spec("flash_attn") is None:
        return None, "flash-attn is not installed"
    try:
        function = importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, OSError, AttributeError) as error:
        return None, f"flash-attn is installed but cannot be imported: {str(error).splitlines()[0]}"
    missing = {"softcap", "window_size", "deterministic"} - inspect.signature(function).parameters.keys()
    if missing:
        return None, f"flash-attn is too old: no {', '.join(sorted(missing))} (2.6 has them)"
    return function, ""


@functools.lru_cache(maxsize=16)
def offsets_of(pieces: tuple[Segment, ...], tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """(cu_seqlens int32, longest document) over the rows read one after the other."""
    ends = [0]
    for r0, r1, _, s1 in pieces:
        ends += [row * tokens + s1 for row in range(r0, r1)]
    longest = max(b - a for a, b in pairwise(ends))
    return torch.tensor(ends, dtype=torch.int32, device=device), longest


def flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Segment], *,
    scale: float, window: int | None, softcap: float | None, causal: bool,
) -> Tensor:  # fmt: skip
    """Attention of all documents in one launch; shapes as in `frugal.ops.attention`. Deterministic."""
    function, reason = load()
    if function is None:
        raise RuntimeError(reason)
    batch, heads, tokens, size = q.shape
    cu_seqlens, longest = offsets_of(tuple(pieces), tokens, q.device)
    flat = [t.transpose(1, 2).reshape(batch * tokens, t.shape[1], size) for t in (q, k, v)]
    settings: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": scale,
        "softcap": softcap or 0.0,
        # flash-attn counts the tokens before, ours the token itself too
        "window_size": (-1, -1) if window is None else (window - 1, 0 if causal else -1),
        "deterministic": True,
    }
    out = function(*flat, cu_seqlens, cu_seqlens, longest, longest, **settings)
    return out.view(batch, tokens, heads, size).transpose(1, 2)
