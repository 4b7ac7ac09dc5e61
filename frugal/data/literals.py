"""Text inside messages that spells a control token, `<|im_end|>` in a user's question for example: it is text, no
token.

Where it lies in the rendered conversation is found by marking it and rendering again, as answers are; transformers'
own name for this is `sanitize_control_tokens`.
"""

from __future__ import annotations

import re
from typing import Any

from frugal.data.render import ChatRenderer, Turn
from frugal.data.sandbox import TemplateRefused

_OPEN, _CLOSE = "\U0010f002", "\U0010f003"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_TEXT_KEYS = ("content", "reasoning_content", "thinking", "name", "tool_call_id", "tool_calls")


def literal_spans(
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
    if rendered is None or _MARKS.sub("", rendered) != text:
        raise TemplateRefused(
            "a message spells one of the template's own tokens, and the two cannot be told apart in the text; "
            "write the token's text differently"
        )
    spans: list[tuple[int, int]] = []
    begin = length = at = 0
    for hit in _MARKS.finditer(rendered):
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
