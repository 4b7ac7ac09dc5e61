"""The mask that frugal's attention builds for transformers: none, but what the operation must know in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from frugal.errors import UnsupportedError
from frugal.ops.attention import host_offsets
from frugal.ops.simulated import is_fake

NAME = "frugal"
WAY_OUT = "load it with attn_implementation='sdpa'"


@dataclass(frozen=True)
class MaskInfo:
    """What the operation must know besides causality. Takes the place of a mask on its way through the model."""

    cu_seqlens: tuple[int, ...] | None
    """Document offsets in the batch read row after row, from restarting position_ids; None: one document a row."""
    window: int | None
    """Sliding window of this mask, the token itself counted."""


def frugal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | MaskInfo | None:
    """transformers' mask interface. None: plain causal rows. `MaskInfo`: documents or a window. A tensor: decoding.

    Raises `UnsupportedError` for padding at the left of a row and for patterns that are not causal documents.
    """
    if kwargs.get("allow_is_bidirectional_skip"):
        raise UnsupportedError(f"frugal attention is causal, this model asks for a bidirectional mask: {WAY_OUT}")
    if q_length != kv_length:
        decoding: Tensor | None = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
            local_size=local_size, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return decoding
    if use_vmap:
        raise UnsupportedError(f"this model adds its own pattern to the attention mask: {WAY_OUT}")
    window = local_size or None  # 0 means none, in some configurations
    known = _DOCUMENTS.get()
    if known is not None and batch_size == 1 and known[-1] == q_length and allow_is_causal_skip:
        return MaskInfo(known, window)
    _refuse_left_padding(attention_mask)
    offsets = None
    if not allow_is_causal_skip and mask_function is not None:
        offsets = _document_offsets(mask_function, batch_size, q_length, device)
    if known is not None:  # and a pattern beside it
        offsets = tuple(sorted({*known, *(offsets or ())}))
    if offsets is None and window is None:
        return None
    return MaskInfo(offsets, window)


def _refuse_left_padding(attention_mask: Tensor | None) -> None:
    """A row's real tokens must come first: under causality padding behind them changes nothing."""
    if attention_mask is None or is_fake(attention_mask) or attention_mask.shape[-1] < 2:
        return
    mask = attention_mask.bool()
    starts_late = (mask[:, 1:] & ~mask[:, :-1]).any(-1)
    if bool(starts_late.any()):
        row = int(starts_late.nonzero()[0, 0])
        raise UnsupportedError(
            f"row {row} of the batch has padding before or between its tokens; frugal attention takes padding "
            f"at the end only. Set padding_side='right', or {WAY_OUT} (batched generation pads at the left)"
        )


def _document_offsets(
    mask_function: Callable[..., Tensor], batch: int, tokens: int, device: torch.device | str
) -> tuple[int, ...] | None:
    """Documents of a causal mask: it shows token i its predecessor i - 1 unless a document starts at i."""
    rows = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    i = torch.arange(1, tokens, device=device)[None, :]
    if tokens < 2 or is_fake(i):
        return None
    sees_next = mask_function(rows, head, i - 1, i)
    if bool(sees_next.any()):
        raise UnsupportedError(f"this model lets tokens see later ones (a bidirectional block): {WAY_OUT}")
    sees_previous = mask_function(rows, head, i, i - 1).expand(batch, tokens - 1)
    if bool(sees_previous.all()):
        return None
    starts = (~sees_previous).nonzero()
    first = [int(row) * tokens + int(column) + 1 for row, column in starts.tolist()]
    return tuple(sorted({*first, *range(0, batch * tokens + 1, tokens)}))


_DOCUMENTS: ContextVar[tuple[int, ...] | None] = ContextVar("frugal_documents", default=None)
"""Offsets of the joined batch that is being computed, where they are known without asking the device."""


@contextlib.contextmanager
def documents_known(model: Any, inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """``inputs`` of a micro-batch as ``model`` is to be given them inside, where no mask reads the device.

    transformers finds the documents of a joined batch in its positions, which it reads back; not where there is a
    mask. A mask of ones says nothing more, and `frugal_mask` knows the documents from the batch. Inputs that are padded
    or of unknown offsets, and models with an attention of transformers' own, are left as they are; so are chunks, which
    transformers counts from the start of the mask then, not of the document.
    """
    offsets, ids = inputs.get("cu_seq_lens_q"), inputs.get("input_ids")
    ours = str(getattr(model.config, "_attn_implementation", "")).startswith(NAME)
    plain = ours and getattr(model.config.get_text_config(), "attention_chunk_size", None) is None
    known = None if offsets is None or not plain or inputs.get("attention_mask") is not None else host_offsets(offsets)
    if known is None or ids is None or is_fake(ids) or tuple(ids.shape) != (1, known[-1]):
        yield inputs
        return
    token = _DOCUMENTS.set(known)
    try:
        yield {**inputs, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    finally:
        _DOCUMENTS.reset(token)
