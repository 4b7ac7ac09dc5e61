"""What passes between the steps of data preparation: conversations in, token rows out."""

from __future__ import annotations

from dataclasses import dataclass, field
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
