"""Alpaca rows: instruction, input and output, with earlier turns in `history`."""

from __future__ import annotations

from typing import Any

from frugal.data.formats.turns import Roles, history_of, question_of, row_reasoning, text_of, with_system
from frugal.data.rows import Example, Message


def fill_alpaca(value: dict[str, Any], example: Example, roles: Roles) -> None:
    """Messages of a row: system, history pairs, then instruction and input with a line break between, then output."""
    messages = history_of(value)
    answer = Message("assistant", text_of(value, "output"), reasoning_content=row_reasoning(value))
    messages += [Message("user", question_of(value)), answer]
    example.messages = with_system(messages, value.get("system"))
