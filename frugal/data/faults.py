"""Faults of rows: how a reader or a format says that a row cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class RowFault(Exception):
    """One row cannot be used.

    ``reason`` is the same text for every row with this fault, so that rows can be counted by it. ``detail`` is what is
    particular to this row (a turn's number, a key's name); it never holds the row's text.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class RawRow:
    """One row as its file has it: keys in the file's order."""

    value: dict[str, Any]
    file: str
    """The source's path as the user wrote it, with the file's name inside a folder behind it."""
    line: int


@dataclass(slots=True)
class BadRow:
    """A row that could not be read."""

    fault: RowFault
    file: str
    line: int
    fatal: bool = False
    """Nothing behind this place can be read, so leaving out one row does not help."""


def shorten(text: str, limit: int = 40) -> str:
    """A key or role as it may stand in a message: quoted, without control characters, at most ``limit`` characters."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def kind_of(value: Any) -> str:
    """The JSON word for a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"a {type(value).__name__}"
