"""Rows to the tensors of one micro-batch: joined to one line of tokens, or padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from frugal.data.rows import TokenRow
from frugal.ops import IGNORE_INDEX


def collate(rows: Sequence[TokenRow], pad_id: int, *, flat: bool) -> dict[str, Any]:
    """Tensors for one micro-batch.

    Labels follow the masks and the rows' lengths, never the value of an id: an end token that shares its id with
    padding stays a target. ``labels[t]`` is token t itself (the model's side shifts), -100 where it is no target.

    Args:
        rows: rows, packed or not. A row of several documents is always flat.
        pad_id: id written behind short rows; never a target.
        flat: join all rows.

    Returns:
        flat: `input_ids`, `labels`, `position_ids` int64 [1, T]; `cu_seq_lens_q`, `cu_seq_lens_k` int32 [documents +
        1]; `max_length_q`, `max_length_k` int. Else `input_ids`, `labels`, `position_ids`, `attention_mask` int64 [B,
        S]. Positions restart with every document.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    if flat or any(len(row.doc_starts) > 2 for row in rows):
        return _joined(rows)
    longest = max(len(row.input_ids) for row in rows)
    shape = (len(rows), longest)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        ids[number, :length] = row.input_ids
        labels[number, :length] = _labels(row)
        mask[number, :length] = 1
    positions = np.broadcast_to(np.arange(longest, dtype=np.int64), shape).copy()
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "attention_mask": torch.from_numpy(mask),
    }


def _joined(rows: Sequence[TokenRow]) -> dict[str, Any]:
    lengths = np.concatenate([np.diff(row.doc_starts) for row in rows]).astype(np.int32)
    lengths = lengths[lengths > 0]
    limits = torch.from_numpy(np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]))
    longest = int(lengths.max(initial=0))
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    return {
        "input_ids": torch.from_numpy(np.concatenate([row.input_ids for row in rows]).astype(np.int64))[None],
        "labels": torch.from_numpy(np.concatenate([_labels(row) for row in rows]))[None],
        "position_ids": torch.from_numpy(positions)[None],
        "cu_seq_lens_q": limits,
        "cu_seq_lens_k": limits.clone(),
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _labels(row: TokenRow) -> np.ndarray:
    labels = np.where(row.trained, row.input_ids, IGNORE_INDEX).astype(np.int64)
    starts = row.doc_starts[:-1]
    labels[starts[starts < len(labels)]] = IGNORE_INDEX  # nothing of its own document stands before it
    return labels
