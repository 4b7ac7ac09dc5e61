"""Finds where a message's text lies in the rendered conversation, by marking it and rendering again.

A mark is one private-use character at an edge of the message's text. The rendering with marks, marks removed, must
equal the rendering without: that proves that the marks changed nothing and lie where the text lies. Nothing is
searched.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from frugal.data.chat.render import FIRST_MARK, LAST_MARK, ChatRenderer, Turn
from frugal.data.chat.sandbox import TemplateRefused

MAX_MESSAGES = LAST_MARK - FIRST_MARK
_MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")
_VARIANTS = ("edges", "end", "inside")


def place_sentinels(
    renderer: ChatRenderer, turns: list[Turn], tools: list[Any] | None, text: str, wanted: Collection[int]
) -> dict[int, tuple[int, int]]:
    """Message index -> (first, last) mark as character positions in ``text``.

    All messages are marked at once; only where the template's text changes by it (it looks at how a text begins or
    ends) each message is tried alone, with other places for its marks. A message that cannot be marked is left out.
    """
    found = _try_marks(renderer, turns, tools, text, dict.fromkeys(wanted, "edges"))
    if found is not None:
        return found
    result: dict[int, tuple[int, int]] = {}
    for index in wanted:
        for variant in _VARIANTS:
            found = _try_marks(renderer, turns, tools, text, {index: variant})
            if found and index in found:
                first, last = found[index]
                # "inside" stands before the last character of the text
                result[index] = (first, last + 1) if variant == "inside" else (first, last)
                break
    return result


def tail_after(renderer: ChatRenderer, turns: list[Turn], tools: list[Any] | None) -> str | None:
    """What the template prints after the text of the last message, or None when that cannot be marked."""
    index = len(turns) - 1
    text = renderer.try_text(turns, tools)
    if text is None:
        return None
    places = place_sentinels(renderer, turns, tools, text, [index])
    return text[places[index][1] :] if index in places else None


def _try_marks(
    renderer: ChatRenderer, turns: list[Turn], tools: list[Any] | None, text: str, variants: dict[int, str]
) -> dict[int, tuple[int, int]] | None:
    marked = [
        _mark(turn, chr(FIRST_MARK + index), variants[index]) if index in variants else turn
        for index, turn in enumerate(turns)
    ]
    rendered = renderer.try_text(marked, tools)
    if rendered is None:
        return None
    places: dict[int, tuple[int, int]] = {}
    parts: list[str] = []
    begin = length = 0
    for hit in _MARKS.finditer(rendered):
        part = rendered[begin : hit.start()]
        parts.append(part)
        length += len(part)
        begin = hit.end()
        index = ord(hit.group()) - FIRST_MARK
        first, _ = places.get(index, (length, length))
        places[index] = (first, length)
    parts.append(rendered[begin:])
    return places if "".join(parts) == text else None


def _mark(turn: Turn, mark: str, variant: str) -> Turn:
    """A copy of the message with marks: around its reasoning and content, after each text of its tool calls."""
    marked = dict(turn)
    for key in ("reasoning_content", "thinking", "content"):
        value = turn.get(key)
        if not isinstance(value, str):
            continue
        if key == "content" and not value and turn.get("tool_calls"):
            continue  # an empty content beside tool calls is not printed; a mark would make it look like text
        core = value.strip()
        lead = value[: len(value) - len(value.lstrip())] if core else value
        trail = value[len(lead) + len(core) :]
        if variant == "edges":
            marked[key] = f"{lead}{mark}{core}{mark}{trail}"
        elif variant == "end":
            marked[key] = f"{lead}{core}{mark}{trail}"
        elif core and key == "content":
            marked[key] = f"{lead}{core[:-1]}{mark}{core[-1]}{trail}"
    if turn.get("tool_calls"):
        marked["tool_calls"] = [_mark_call(call, mark) for call in turn["tool_calls"]]
    return marked


def _mark_call(call: dict[str, Any], mark: str) -> dict[str, Any]:
    function = call.get("function", call)
    # Not the name: some templates print it a second time before the function's answer.
    if "arguments" not in function:
        return call
    changed = {**function, "arguments": _mark_texts(function["arguments"], mark)}
    return {**call, "function": changed} if "function" in call else changed


def _mark_texts(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {key: _mark_texts(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark_texts(item, mark) for item in value]
    return value


_OPEN, _CLOSE = "\U0010f002", "\U0010f003"
_ESCAPE_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_TEXT_KEYS = ("content", "reasoning_content", "thinking", "name", "tool_call_id", "tool_calls")


def escaped_spans(
    renderer: ChatRenderer, turns: list[Turn], tools: list[Any] | None, text: str, *, prompt: bool = False
) -> list[tuple[int, int]]:
    """Character spans of ``text`` that spell a control token and come from a message or a tool.

    Raises TemplateRefused when they cannot be told from the template's own tokens.
    """
    pattern = renderer.control_pattern
    if not any(_spells(pattern, [turn.get(key) for key in _TEXT_KEYS]) for turn in turns) and not _spells(
        pattern, tools
    ):
        return []
    marked = [{key: _marked(pattern, value) if key in _TEXT_KEYS else value for key, value in t.items()} for t in turns]
    rendered = renderer.try_text(marked, _marked(pattern, tools), prompt=prompt)
    if rendered is None or _ESCAPE_MARKS.sub("", rendered) != text:
        raise TemplateRefused(
            "a message spells one of the template's own tokens, and the two cannot be told apart in the text; "
            "write the token's text differently"
        )
    spans: list[tuple[int, int]] = []
    begin = length = at = 0
    for hit in _ESCAPE_MARKS.finditer(rendered):
        length += hit.start() - at
        at = hit.end()
        if hit.group() == _OPEN:
            begin = length
        elif begin < length:
            spans.append((begin, length))
    return spans


def _spells(pattern: re.Pattern[str], value: Any) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(_spells(pattern, item) for item in value.values())
    return isinstance(value, list) and any(_spells(pattern, item) for item in value)


def _marked(pattern: re.Pattern[str], value: Any) -> Any:
    if isinstance(value, str):
        return pattern.sub(f"{_OPEN}\\g<0>{_CLOSE}", value)
    if isinstance(value, dict):
        return {key: _marked(pattern, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(pattern, item) for item in value]
    return value
