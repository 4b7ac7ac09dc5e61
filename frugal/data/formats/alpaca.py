"""Alpaca rows: instruction, input and output, with earlier turns in `history`."""

from __future__ import annotations

from typing import Any

from frugal.data.formats.turns import Roles, question_of, row_reasoning, text_of, with_system
from frugal.data.rows import Example, Message, RowError, kind_of


def fill_alpaca(value: dict[str, Any], example: Example, roles: Roles) -> None:
    """Messages of a row: system, history pairs, then instruction and input with a line break between, then output."""
    messages: list[Message] = []
    history = value.get("history")
    if history is not None and history != "":
        if not isinstance(history, (list, tuple)):
            raise RowError(f"`history` is {kind_of(history)}, not a list of [question, answer] pairs")
        for pair in history:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
                raise RowError("`history` has an entry that is not [question, answer]")
            messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    answer = Message("assistant", text_of(value, "output"), reasoning_content=row_reasoning(value))
    messages += [Message("user", question_of(value)), answer]
    example.messages = with_system(messages, value.get("system"))
