"""Causal attention over packed or right-padded rows, without an [S, S] tensor.

q is [batch, query_heads, tokens, head_size], k and v [batch, kv_heads, tokens, head_size] with query_heads a multiple
of kv_heads (grouped-query attention; kv_heads 1 is multi-query). ``cu_seqlens`` are the offsets of the documents in
the batch read row after row: [0, ..., batch * tokens]; a row's end is always a document's end. Padding at the end of a
row needs no mask: under causality no earlier token sees it. ``window`` counts the token itself (transformers'
meaning): token i sees max(0, i - window + 1) .. i. Only q, k, v, out and the log-sum-exp [batch, heads, tokens] are
kept for backward.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from frugal.errors import UnsupportedError
from frugal.ops.attention.blockwise import blockwise_backward, blockwise_forward
from frugal.ops.attention.cpu_flash import cpu_flash_backward, cpu_flash_forward
from frugal.ops.attention.flash_attn import flash_varlen
from frugal.ops.attention.sdpa import sdpa
from frugal.ops.attention.simulated import allocate
from frugal.ops.host_values import on_host
from frugal.ops.registry import implements, resolve, simulates
from frugal.ops.rows import cpu_flash_refusal
from frugal.ops.simulated import is_fake, simulated_attention, simulated_device, stands_for_cuda

CuSeqlens: TypeAlias = Tensor | Sequence[int]
Segment: TypeAlias = tuple[int, int, int, int]  # rows from..to (exclusive), tokens from..to (exclusive)

_HOST_OFFSETS = WeakTensorKeyDictionary()  # made a tuple once a batch, not once a layer


def host_offsets(cu_seqlens: CuSeqlens) -> tuple[int, ...] | None:
    """Document offsets as Python ints. None for a fake tensor, whose values nobody knows: one document a row then."""
    if not isinstance(cu_seqlens, Tensor):
        return tuple(int(offset) for offset in cu_seqlens)
    if is_fake(cu_seqlens):
        return None
    known = _HOST_OFFSETS.get(cu_seqlens)
    if known is not None and known[0] == cu_seqlens._version:
        return known[1]  # type: ignore[no-any-return]
    offsets = tuple(int(offset) for offset in on_host(cu_seqlens).tolist())
    _HOST_OFFSETS[cu_seqlens] = (cu_seqlens._version, offsets)
    return offsets


def segments(batch: int, tokens: int, cu_seqlens: CuSeqlens | None) -> list[Segment]:
    """Documents as (first row, last row + 1, first token, last token + 1); whole rows are taken together.

    Raises ``ValueError`` when the offsets do not rise from 0 to batch * tokens.
    """
    return list(_segments(batch, tokens, None if cu_seqlens is None else host_offsets(cu_seqlens)))


@functools.lru_cache(maxsize=16)  # of a micro-batch, asked for by every layer
def _segments(batch: int, tokens: int, offsets: tuple[int, ...] | None) -> tuple[Segment, ...]:
    if offsets is None:
        return ((0, batch, 0, tokens),) if batch and tokens else ()
    rising = all(a <= b for a, b in pairwise(offsets))
    if not offsets or offsets[0] != 0 or offsets[-1] != batch * tokens or not rising:
        raise ValueError(f"cu_seqlens must rise from 0 to batch * tokens = {batch * tokens}, got {offsets[:4]} ... "
                         f"{offsets[-2:]}")  # fmt: skip
    found: list[Segment] = []
    for start, end in pairwise(offsets):
        while start < end:
            row = start // tokens
            stop = min(end, (row + 1) * tokens)
            piece = (row, row + 1, start - row * tokens, stop - row * tokens)
            last = found[-1] if found else None
            if last is not None and last[1] == row and last[2:] == piece[2:] == (0, tokens):
                found[-1] = (last[0], row + 1, 0, tokens)
            else:
                found.append(piece)
            start = stop
    return tuple(found)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: CuSeqlens | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
) -> Tensor:
    """The definition, with the whole [S, S] score matrix and a mask. Arguments as in `attention`."""
    batch, heads, tokens, size = q.shape
    scale = 1 / math.sqrt(size) if scale is None else scale
    groups = heads // k.shape[1]
    acc = torch.promote_types(q.dtype, torch.float32)
    k, v = (t.repeat_interleave(groups, dim=1).to(acc) for t in (k, v))
    scores = scale * q.to(acc) @ k.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    offsets = torch.tensor(host_offsets(cu_seqlens) if cu_seqlens is not None else [0], device=q.device)
    flat = torch.arange(batch * tokens, device=q.device)
    document = torch.bucketize(flat, offsets, right=True).view(batch, tokens)
    i, j = torch.arange(tokens, device=q.device)[:, None], torch.arange(tokens, device=q.device)[None, :]
    seen = (document[:, :, None] == document[:, None, :]) & ((i >= j) if causal else (i == i))
    if window is not None:
        seen = seen & (i - j < window)
    return (scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v).to(q.dtype)


def _like_rows(t: Tensor) -> Tensor:
    """Uninitialised [batch, heads, tokens, size] laid out token by token, as the next projection reads it."""
    batch, heads, tokens, size = t.shape
    return t.new_empty(batch, tokens, heads, size).transpose(1, 2)


def _kernels(module: str) -> Any:
    """Triton is optional: its modules are imported when a row that needs them was chosen."""
    return importlib.import_module(f"frugal.ops.attention.{module}")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: list[Segment], form: str, scale: float,
                window: int | None, softcap: float | None, causal: bool) -> Tensor:  # fmt: skip
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "causal": causal}
        batch, heads, tokens, _ = q.shape
        if form == "triton":
            out, lse = _kernels("triton").attention_forward(q, k, v, pieces, **settings)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.pieces, ctx.form, ctx.settings = pieces, form, settings
            return out  # type: ignore[no-any-return]
        run = cpu_flash_forward if form == "cpu_flash" else blockwise_forward
        if len(pieces) == 1 and pieces[0] == (0, batch, 0, tokens):
            out, lse = run(q, k, v, **settings)
        else:
            out = _like_rows(q)
            lse = q.new_empty(batch, heads, tokens, dtype=torch.promote_types(q.dtype, torch.float32))
            for r0, r1, s0, s1 in pieces:
                part, part_lse = run(q[r0:r1, :, s0:s1], k[r0:r1, :, s0:s1], v[r0:r1, :, s0:s1], **settings)
                out[r0:r1, :, s0:s1] = part
                lse[r0:r1, :, s0:s1] = part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.form, ctx.settings = pieces, form, settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = outputs
        q, k, v, out, lse = ctx.saved_tensors
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        if ctx.form == "triton":
            backward = _kernels("triton_backward").attention_backward
            return (*backward(d_out, q, k, v, out, lse, ctx.pieces, **ctx.settings), *[None] * 6)
        run = cpu_flash_backward if ctx.form == "cpu_flash" else blockwise_backward
        if len(ctx.pieces) == 1 and ctx.pieces[0] == (0, q.shape[0], 0, q.shape[2]):
            grads: tuple[Tensor, ...] = run(d_out, q, k, v, out, lse, **ctx.settings)
        else:
            grads = tuple(_like_rows(t) for t in (q, k, v))
            for r0, r1, s0, s1 in ctx.pieces:
                parts = run(*(t[r0:r1, :, s0:s1] for t in (d_out, q, k, v, out, lse)), **ctx.settings)
                for grad, part in zip(grads, parts, strict=True):
                    grad[r0:r1, :, s0:s1] = part
        return (*grads, None, None, None, None, None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: CuSeqlens | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    implementation: str | None = None,
) -> Tensor:
    """softmax(scale q k^T) v within documents; shapes in the module's text. Returns [batch, query_heads, tokens, size].

    ``scale`` is 1 / sqrt(head_size) unless given; ``softcap`` c turns a score s into c tanh(s / c). ``implementation``
    names a row of the table; unset, the table chooses. Raises ``ValueError`` for shapes or offsets that do not fit.
    """
    if q.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"q [B, Hq, S, D] and k, v [B, Hkv, S, D] expected, got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key/value heads")
    if window is not None and window < 1:
        raise ValueError(f"window counts the token itself: at least 1, got {window}")
    batch, _, tokens, size = q.shape
    scale = 1 / math.sqrt(size) if scale is None else scale
    pieces = segments(batch, tokens, cu_seqlens)
    planned = simulated_device() if stands_for_cuda(q) else None
    if planned is not None and simulated_attention() != "auto":
        implementation = simulated_attention()
    longest = max((s1 - s0 for _, _, s0, s1 in pieces), default=0)
    if window is not None and causal and window >= longest:
        window = None
    documents = sum(r1 - r0 for r0, r1, _, _ in pieces)
    if planned is not None and cu_seqlens is not None:
        documents = len(cu_seqlens) - 1  # the offsets of a fake batch are not known, their number is
    run, _ = resolve(
        "attention", q, implementation, window=window, softcap=softcap, causal=causal, head_size=size,
        documents=documents,
    )  # fmt: skip
    if not pieces:
        return q * 0.0 + (k.sum() + v.sum()) * 0.0
    if planned is not None:
        pieces = [(0, batch, 0, tokens)]
    settings = Settings(pieces, documents, scale, window, softcap, causal)
    out: Tensor = run(q, k, v, settings)
    return out


@dataclass(frozen=True)
class Settings:
    """What every form of attention is given besides q, k and v."""

    pieces: list[Segment]
    documents: int
    scale: float
    window: int | None
    softcap: float | None
    causal: bool


@implements("attention", "reference")
def _by_definition(q: Tensor, k: Tensor, v: Tensor, s: Settings) -> Tensor:
    batch, _, tokens, _ = q.shape
    ends = {row * tokens for row in range(batch + 1)} | {r0 * tokens + s0 for r0, _, s0, _ in s.pieces}
    return attention_reference(
        q, k, v, cu_seqlens=sorted(ends), scale=s.scale, window=s.window, softcap=s.softcap, causal=s.causal
    )


@implements("attention", "sdpa")
def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, s: Settings) -> Tensor:
    if s.window is not None or s.softcap is not None:  # asked for by name
        what = "window" if s.window is not None else "soft cap"
        raise UnsupportedError(f"scaled_dot_product_attention has no {what}: name another implementation, or none")
    return sdpa(q, k, v, s.pieces, s.scale, s.causal)


@implements("attention", "flash_attn")
def _by_flash_attn(q: Tensor, k: Tensor, v: Tensor, s: Settings) -> Tensor:
    return flash_varlen(q, k, v, s.pieces, scale=s.scale, window=s.window, softcap=s.softcap, causal=s.causal)


def _apply(q: Tensor, k: Tensor, v: Tensor, s: Settings, *, form: str) -> Tensor:
    if form == "cpu_flash" and (refused := cpu_flash_refusal(vars(s))):  # asked for by name
        raise UnsupportedError(f"{refused}: name another implementation, or none")
    out: Tensor = _Attention.apply(q, k, v, s.pieces, form, s.scale, s.window, s.softcap, s.causal)
    return out


def _simulate(q: Tensor, k: Tensor, v: Tensor, s: Settings, *, form: str) -> Tensor:
    return allocate(form, q, k, v, s.documents)


for _form in ("triton", "cpu_flash", "blockwise"):
    implements("attention", _form)(functools.partial(_apply, form=_form))
for _form in ("flash_attn", "triton", "sdpa"):
    simulates("attention", _form)(functools.partial(_simulate, form=_form))
