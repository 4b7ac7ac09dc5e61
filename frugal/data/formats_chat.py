"""Turns of a chat, in the words of several tools, into messages."""

from __future__ import annotations

import math
from typing import Any

from frugal.data.faults import RowFault, kind_of, shorten
from frugal.data.roles import role_of
from frugal.data.tool_calls import json_or_value, tool_calls_of
from frugal.data.types import Message

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
Roles = dict[str, str]
"""Words for roles that were met and what each became, for the account."""


def messages_of(value: Any, key: str, roles: Roles) -> list[Message]:
    """One message for every turn of ``value``, a list of turns or its JSON text (CSV); ``key`` is its name in the row.

    A turn is `role` + `content` or `from` + `value`. Order is not judged here: system-only chats, two user turns in a
    row and a first assistant turn come through as they are.

    Raises:
        RowFault: no list, no turns, or a turn with an unknown role or content that is not text.
    """
    turns = json_or_value(value, f"`{key}`")
    if not isinstance(turns, (list, tuple)):
        raise RowFault(f"`{key}` is {kind_of(turns)}, not a list of turns")
    if not turns:
        raise RowFault(f"`{key}` has no turns")
    return [_message(turn, f"turn {number} of `{key}`", roles) for number, turn in enumerate(turns, start=1)]


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """``messages`` with a row's own `system` text in front; an empty one is none.

    Raises:
        RowFault: not a text, or the chat has a system turn already.
    """
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise RowFault(f"`system` is {kind_of(system)}, not a text")
    if messages and messages[0].role == "system":
        raise RowFault("a system text and a system turn; keep one")
    return [Message("system", system), *messages]


def text_of(row: dict[str, Any], key: str) -> str:
    """A row's value that must be a text."""
    text = row.get(key)
    if isinstance(text, str):
        return text
    what = "NaN" if isinstance(text, float) and math.isnan(text) else kind_of(text)
    raise RowFault(f"`{key}` is {what}, not a text")


def question_of(row: dict[str, Any]) -> str:
    """Alpaca's instruction and, where there is one, input: joined by a line break."""
    parts = [text_of(row, "instruction")]
    if row.get("input") is not None:
        parts.append(text_of(row, "input"))
    return "\n".join(part for part in parts if part)


def _message(turn: Any, where: str, roles: Roles) -> Message:
    if isinstance(turn, str):  # each turn as JSON text of its own, as columnar files hold them
        turn = json_or_value(turn, "a turn")
    if not isinstance(turn, dict):
        raise RowFault(f"a turn is {kind_of(turn)}, not an object", where)
    role_key = "role" if turn.get("role") is not None else "from"
    word = turn.get(role_key)
    if word is None:
        raise RowFault("a turn has no role", f"{where}; it has: {key_list(turn)}")
    role, is_call = role_of(word, where)
    roles.setdefault(word, f"{role} (tool call)" if is_call else role)
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if is_call:
        return Message(role, None, tool_calls=tool_calls_of(content, where), train=_train_switch(turn, where))
    calls = _calls(turn, where)
    if calls is not None and role != "assistant":
        raise RowFault("tool calls in a turn that is not the assistant's", where)
    return Message(
        role=role,
        content=_content(content, has_calls=calls is not None, where=where),
        tool_calls=calls,
        reasoning_content=_reasoning(turn, where) if role == "assistant" else None,
        name=_optional_text(turn, "name", where),
        tool_call_id=_optional_text(turn, "tool_call_id", where),
        train=_train_switch(turn, where),
    )


def _calls(turn: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """`tool_calls`, or `function_call` of OpenAI's first form; null and empty ones are none."""
    for key in ("tool_calls", "function_call"):
        value = turn.get(key)
        if value is not None and value not in ("", "[]", [], {}):
            return tool_calls_of(value, where)
    return None


def _content(content: Any, *, has_calls: bool, where: str) -> str | None:
    """A turn's text. Text parts `{"type": "text", "text": ...}` are joined without anything between."""
    if isinstance(content, str):
        return content
    if content is None:
        if has_calls:
            return None
        raise RowFault("content is null or missing without tool calls", where)
    if isinstance(content, (list, tuple)):
        return "".join(_part(part, where) for part in content)
    what = "NaN" if isinstance(content, float) and math.isnan(content) else kind_of(content)
    raise RowFault(f"content is {what}, not a text", where)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    detail = f"{where}, part of type {shorten(kind)}" if isinstance(kind, str) else where
    raise RowFault('content has a part that is not {"type": "text", "text": "..."}', detail)


def _reasoning(turn: dict[str, Any], where: str) -> str | None:
    for key in _REASONING_KEYS:
        text = _optional_text(turn, key, where)
        if text is not None:
            return text
    return None


def _optional_text(turn: dict[str, Any], key: str, where: str) -> str | None:
    value = turn.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RowFault(f"`{key}` of a turn is {kind_of(value)}, not a text", where)


def _train_switch(turn: dict[str, Any], where: str) -> bool | None:
    """The turn's own switch: `train: true/false`, or `weight: 0/1` as OpenAI has it."""
    for key in ("train", "weight"):
        value = turn.get(key)
        if value is None:
            continue
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
        raise RowFault(f"`{key}` of a turn is neither 0/1 nor true/false", where)
    return None


def key_list(row: dict[str, Any], limit: int = 12) -> str:
    """A row's keys for a message."""
    names = [shorten(str(key)).strip("'\"") for key in row]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "") or "nothing"
