"""What passes between the steps of data preparation: raw rows and their errors, conversations, token rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class Message:
    """One turn, in the words of the chat-template world."""

    role: Role
    content: str | None
    """Text; None only together with tool_calls."""
    tool_calls: list[dict[str, Any]] | None = None
    """OpenAI form: {"type": "function", "function": {"name": str, "arguments": dict}}; key order as in the file."""
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    train: bool | None = None
    """A per-turn switch in the row (`weight: 0/1`, `train: true/false`); None follows data.train_on."""


@dataclass(slots=True)
class Example:
    """One row of a source, read and checked, not yet rendered."""

    kind: Literal["messages", "prompt_completion", "text", "preference"]
    source: str
    """Path or id as the user wrote it (with the file's name behind it for a folder), for messages."""
    line: int
    """1-based line where the row starts (JSON, JSONL, CSV, text) or 1-based row (Parquet, hub)."""
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    """JSON-schema tool descriptions as the template expects them."""
    prompt: str = ""
    completion: str = ""
    text: str = ""
    chosen: list[Message] = field(default_factory=list)
    rejected: list[Message] = field(default_factory=list)
    good: bool | None = None
    """The verdict on a single answer, which is both `chosen` and `rejected` then; None for a pair and all else."""

    def content(self) -> bytes:
        """What the row says, wherever it stands: the same bytes for the same content. (Not by `asdict`, which copies
        deeply: several times slower.)"""
        named = {name: getattr(self, name) for name in _CONTENT}
        return json.dumps(named, default=_turn).encode()


_CONTENT = tuple(one.name for one in fields(Example) if one.name not in ("source", "line"))
_TURN = tuple(one.name for one in fields(Message))


def _turn(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _TURN}


@dataclass(slots=True)
class TokenRow:
    """One training row: a document, or several packed ones."""

    input_ids: np.ndarray
    """int32 [tokens]"""
    trained: np.ndarray
    """bool [tokens]: True where the token itself is a target. The first token of a document never is."""
    doc_starts: np.ndarray
    """int32 [documents + 1]: where each document starts, ending with len(input_ids) (`cu_seqlens` of this row)."""
    origin: np.ndarray
    """int32 [documents]: index of the source example, so that row order can be proven."""


class RowError(Exception):
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

    fault: RowError
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
