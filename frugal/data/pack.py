"""Packing: short documents joined to rows of at most `max_length` tokens, none of them split.

Best-fit decreasing: documents from long to short, each into the fullest row that still has room. The order of equal
lengths is the file's, so the result depends on the lengths alone.
"""

from __future__ import annotations

import bisect
from collections import defaultdict

import numpy as np


def pack(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Rows of document numbers; rows by their first document, documents within a row in the file's order.

    Args:
        lengths: int [documents], each between 0 and ``max_length``.
        max_length: most tokens of a row.
    """
    if len(lengths) and int(np.max(lengths)) > max_length:
        raise ValueError(f"a document of {int(np.max(lengths))} tokens does not fit a row of {max_length}")
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    rooms: list[int] = []  # sorted: amounts of room that some row has
    rows_with: dict[int, list[list[int]]] = defaultdict(list)
    rows: list[list[int]] = []
    for document in order.tolist():
        length = int(lengths[document])
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms.pop(place)
        else:
            room, row = max_length, []
            rows.append(row)
        row.append(document)
        left = room - length
        if not rows_with[left]:
            bisect.insort(rooms, left)
        rows_with[left].append(row)
    return sorted(sorted(row) for row in rows)


def fill_rate(lengths: np.ndarray, rows: int, max_length: int) -> float:
    """Part of the packed rows' room that holds tokens."""
    return float(np.sum(lengths)) / (rows * max_length) if rows else 0.0
