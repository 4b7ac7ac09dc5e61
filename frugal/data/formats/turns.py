"""Turns of a chat, their roles and tool calls, in the words of several tools, into messages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from frugal.data.formats.meaning import REASONING, refuse_unused, switch_of
from frugal.data.rows import Message, Role, RowError, kind_of, shorten
from frugal.data.sources.strict_json import loads

FUNCTION_CALL = "function_call"
"""Not a role of chat templates: an assistant turn whose text is the JSON of one or more tool calls."""

ROLE_ALIASES: dict[str, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bard", "model"),
    FUNCTION_CALL: ("function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
}
"""What a turn becomes -> the words for it in files, letter case aside. `function_call` becomes an assistant turn."""

_BY_WORD: dict[str, str] = {word: role for role, words in ROLE_ALIASES.items() for word in words}
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def role_of(word: Any, turn: str) -> tuple[Role, bool]:
    """(role, whether the turn is a function call) for a role's word in a file; ``turn`` is for the message.

    Raises:
        RowError: not a text, or a word that the table does not have.
    """
    if not isinstance(word, str):
        raise RowError("a role is not a text", f"{turn}: {kind_of(word)}")
    known = _BY_WORD.get(word) or _BY_WORD.get(word.strip().casefold())
    if known is None:
        raise RowError("unknown role", f"{shorten(word)} in {turn}; known: {', '.join(_BY_WORD)}")
    if known == FUNCTION_CALL:
        return "assistant", True
    return _ROLES[known], False


Roles = dict[str, str]
"""Words for roles that were met and what each became, for the report."""


def messages_of(value: Any, key: str, roles: Roles) -> list[Message]:
    """One message for every turn of ``value``, a list of turns or its JSON text (CSV); ``key`` is its name in the row.

    A turn is `role` + `content` or `from` + `value`. Order is not judged here: system-only chats, two user turns in a
    row and a first assistant turn come through as they are.

    Raises:
        RowError: no list, no turns, or a turn with an unknown role or content that is not text.
    """
    turns = json_or_value(value, f"`{key}`")
    if not isinstance(turns, (list, tuple)):
        raise RowError(f"`{key}` is {kind_of(turns)}, not a list of turns")
    if not turns:
        raise RowError(f"`{key}` has no turns")
    return [_message(turn, f"turn {number} of `{key}`", roles) for number, turn in enumerate(turns, start=1)]


def row_reasoning(value: dict[str, Any]) -> str | None:
    """The reasoning that a row of question and answer holds beside the answer; None when there is none."""
    for key in REASONING:
        if value.get(key) not in (None, ""):
            return text_of(value, key)
    return None


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """``messages`` with a row's own `system` text in front; an empty one is none.

    Raises:
        RowError: not a text, or the chat has a system turn already.
    """
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise RowError(f"`system` is {kind_of(system)}, not a text")
    if messages and messages[0].role == "system":
        raise RowError("a system text and a system turn; keep one")
    return [Message("system", system), *messages]


def text_of(row: dict[str, Any], key: str) -> str:
    """A row's value that must be a text."""
    text = row.get(key)
    if isinstance(text, str):
        return text
    what = "NaN" if isinstance(text, float) and math.isnan(text) else kind_of(text)
    raise RowError(f"`{key}` is {what}, not a text")


def question_of(row: dict[str, Any]) -> str:
    """Alpaca's instruction and, where there is one, input: joined by a line break."""
    parts = [text_of(row, "instruction")]
    if row.get("input") is not None:
        parts.append(text_of(row, "input"))
    return "\n".join(part for part in parts if part)


def history_of(row: dict[str, Any]) -> list[Message]:
    """Turns of Alpaca's `history`: [question, answer] pairs before the instruction."""
    history = row.get("history")
    messages: list[Message] = []
    if history is not None and history != "":
        if not isinstance(history, (list, tuple)):
            raise RowError(f"`history` is {kind_of(history)}, not a list of [question, answer] pairs")
        for pair in history:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
                raise RowError("`history` has an entry that is not [question, answer]")
            messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    return messages


def _message(turn: Any, where: str, roles: Roles) -> Message:
    if isinstance(turn, str):  # each turn as JSON text of its own, as columnar files hold them
        turn = json_or_value(turn, "a turn")
    if not isinstance(turn, dict):
        raise RowError(f"a turn is {kind_of(turn)}, not an object", where)
    role_key = "role" if turn.get("role") is not None else "from"
    word = turn.get(role_key)
    if word is None:
        raise RowError("a turn has no role", f"{where}; it has: {key_list(turn)}")
    role, is_call = role_of(word, where)
    roles.setdefault(word, f"{role} (tool call)" if is_call else role)
    refuse_unused(turn, REASONING, where)
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    train = switch_of(turn, "a turn", where)
    if is_call:
        return Message(role, None, tool_calls=tool_calls_of(content, where), train=train)
    parts = _Parts()
    if isinstance(content, (list, tuple)):
        parts.read(content, where)
        content = "".join(parts.texts) if parts.texts or not parts.calls else None
    calls = _calls(turn, where) or parts.calls or None
    reasoning = _reasoning(turn, where)
    if parts.reasoning:
        if reasoning:
            raise RowError("reasoning is given twice: as a key and as a part", where)
        reasoning = "".join(parts.reasoning)
    if role != "assistant" and (calls is not None or parts.reasoning):
        what = "tool calls" if calls is not None else "reasoning"
        raise RowError(f"{what} in a turn that is not the assistant's", where)
    return Message(
        role=role,
        content=_content(content, has_calls=calls is not None, where=where),
        tool_calls=calls,
        reasoning_content=reasoning if role == "assistant" else None,
        name=_optional_text(turn, "name", where),
        tool_call_id=_optional_text(turn, "tool_call_id", where),
        train=train,
    )


def _calls(turn: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """`tool_calls`, or `function_call` of OpenAI's first form; null and empty ones are none."""
    for key in ("tool_calls", "function_call"):
        value = turn.get(key)
        if value is not None and value not in ("", "[]", [], {}):
            return tool_calls_of(value, where)
    return None


def _content(content: Any, *, has_calls: bool, where: str) -> str | None:
    """A turn's text."""
    if isinstance(content, str):
        return content
    if content is None:
        if has_calls:
            return None
        raise RowError("content is null or missing without tool calls", where)
    what = "NaN" if isinstance(content, float) and math.isnan(content) else kind_of(content)
    raise RowError(f"content is {what}, not a text", where)


_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking", "reasoning_content")
_CALL_PARTS = ("tool_call", "tool_calls", "function_call")
_PART_VALUES = ("text", "value", "content")
"""Keys that hold what a part says, beside one that is named like its type."""


@dataclass
class _Parts:
    """Typed parts of one turn, by kind; texts are joined without anything between."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def read(self, parts: Sequence[Any], where: str) -> None:
        for part in parts:
            if isinstance(part, str):
                self.texts.append(part)
                continue
            kind = part.get("type") or "text" if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in (*_TEXT_PARTS, *_REASONING_PARTS, *_CALL_PARTS):
                detail = f"{where}, part of type {shorten(kind)}" if isinstance(kind, str) else where
                raise RowError('content has a part that is not {"type": "text", "text": "..."}', detail)
            keys = tuple(dict.fromkeys((*_PART_VALUES, kind))) + (("function",) if kind in _CALL_PARTS else ())
            given = [part[key] for key in keys if part.get(key) is not None]
            if kind in _CALL_PARTS and given:
                self.calls += tool_calls_of(given[0], where)
            elif len(given) == 1 and isinstance(given[0], str):
                (self.texts if kind in _TEXT_PARTS else self.reasoning).append(given[0])
            else:
                detail = f"{where}, type {shorten(kind)}; its keys: {key_list(part)}"
                raise RowError('content has a part that is not {"type": "text", "text": "..."}', detail)


def _reasoning(turn: dict[str, Any], where: str) -> str | None:
    for key in REASONING:
        text = _optional_text(turn, key, where)
        if text is not None:
            return text
    return None


def _optional_text(turn: dict[str, Any], key: str, where: str) -> str | None:
    value = turn.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RowError(f"`{key}` of a turn is {kind_of(value)}, not a text", where)


def key_list(row: dict[str, Any], limit: int = 12) -> str:
    """A row's keys for a message."""
    names = [shorten(str(key)).strip("'\"") for key in row]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "") or "nothing"


def json_or_value(value: Any, what: str) -> Any:
    """``value``, decoded when it is a text that holds JSON."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except RowError as fault:
        raise RowError(f"{what}: {fault.reason}", fault.detail) from None


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Tool descriptions as `{"type": "function", "function": {...}}`; None when there are none.

    ``value`` is a list or its JSON text; bare `{"name": ..., "parameters": ...}` descriptions are wrapped.

    Raises:
        RowError: not JSON, not a list of objects, or a description without a name.
    """
    if value is None or value == "":
        return None
    tools = json_or_value(value, "`tools`")
    if not isinstance(tools, list):
        raise RowError(f"`tools` is {kind_of(tools)}, not a list")
    described = []
    for number, tool in enumerate(tools, start=1):
        if isinstance(tool, str):  # each description as JSON text of its own, as columnar files hold them
            tool = json_or_value(tool, "`tools`")
        inner = tool.get("function") if isinstance(tool, dict) and "function" in tool else tool
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RowError("a tool description has no name", f"tool {number}")
        _require_json(tool, f"tool {number}")
        described.append(tool if inner is not tool else {"type": "function", "function": tool})
    return described or None


def tool_calls_of(value: Any, turn: str) -> list[dict[str, Any]]:
    """Tool calls as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, with `id` where it is given.

    ``value`` is one call or a list, or its JSON text. A call is in OpenAI's form or bare `{"name", "arguments"}`;
    arguments are an object or its JSON text, and missing, null or empty ones are `{}`.

    Raises:
        RowError: not JSON, no call in it, a call without a name, or arguments that are no object.
    """
    calls = json_or_value(value, "a tool call")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        what = "an empty list" if calls == [] else kind_of(calls)
        raise RowError(f"a tool call is {what}, not an object with name and arguments", turn)
    return [_call(call, turn) for call in calls]


def _call(call: Any, turn: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = json_or_value(call, "a tool call")
    if not isinstance(call, dict):
        raise RowError(f"a tool call is {kind_of(call)}, not an object with name and arguments", turn)
    kind = call.get("type") or "function"
    if kind != "function":
        raise RowError("a tool call is not of type function", turn)
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError("a tool call has no name", turn)
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    arguments = json_or_value(arguments, "arguments of a tool call")
    if not isinstance(arguments, dict):
        raise RowError(f"arguments of a tool call are {kind_of(arguments)}, not an object", turn)
    _require_json(arguments, turn)
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _require_json(value: Any, where: str) -> None:
    """Columnar files can hold dates and bytes, which no template can print as JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise RowError("a tool call or description holds a value that JSON has no form for", where) from None
