"""Rows longer than `max_length`, and rows that end up with nothing to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Overflow = Literal["truncate", "drop", "error"]


@dataclass(slots=True)
class Fitted:
    """What became of one row."""

    pieces: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """(ids, trained) of each document that goes to training."""
    cut_tokens: int = 0
    """Tokens that truncation took away."""
    too_long: bool = False
    """The row was longer than allowed."""
    empty: bool = False
    """Nothing is left to train."""
    empty_by_length: bool = False
    """Nothing is left because truncation took the trained tokens."""


def fit(ids: np.ndarray, trained: np.ndarray, max_length: int, on_overflow: Overflow, *, split: bool) -> Fitted:
    """Apply `data.on_overflow` to one row.

    Args:
        ids: int32 [tokens].
        trained: bool [tokens].
        max_length: most tokens of a document.
        on_overflow: `truncate` keeps the beginning; `drop` and `error` leave the row out (the caller stops or counts).
        split: cut the row into pieces instead of truncating it (plain text: every piece is trained).
    """
    result = Fitted(too_long=len(ids) > max_length)
    if result.too_long and on_overflow != "truncate":
        return result
    step = max_length if split else max(len(ids), 1)
    pieces = [(ids[at : at + step], trained[at : at + step].copy()) for at in range(0, len(ids), step)]
    if result.too_long and not split:
        result.cut_tokens = len(ids) - max_length
        pieces = [(ids[:max_length], trained[:max_length])]
    for _, mask in pieces:
        mask[0] = False
    result.pieces = [(piece, mask) for piece, mask in pieces if mask.any()]
    result.empty = not result.pieces
    result.empty_by_length = result.empty and bool(trained.any()) and result.too_long
    return result
