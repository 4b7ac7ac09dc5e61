"""Prompt and completion: two texts (turns of a chat where the base has a chat template, see `encode.py`), or two lists
of messages."""

from __future__ import annotations

from typing import Any

from frugal.data.formats.turns import Roles, messages_of, row_reasoning, text_of, with_system
from frugal.data.rows import Example, Message, RowError


def fill_prompt_completion(value: dict[str, Any], example: Example, roles: Roles) -> None:
    """Two texts, or two lists of messages of which only the completion is trained. A row's `system` and reasoning stand
    around them."""
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple)):
        before = messages_of(prompt, "prompt", roles)
        for message in before:
            message.train = False
        after = messages_of(completion, "completion", roles)
        example.messages = with_system(before + after, value.get("system"))
        if row_reasoning(value) is not None:
            raise RowError("reasoning beside lists of messages", "put it into the turn as reasoning_content")
        return
    if isinstance(prompt, (list, tuple)) or isinstance(completion, (list, tuple)):
        raise RowError("`prompt` and `completion` are not both texts or both lists of messages")
    example.kind = "prompt_completion"
    example.prompt = text_of(value, "prompt")
    example.completion = text_of(value, "completion")
    answer = Message("assistant", example.completion, reasoning_content=row_reasoning(value))
    example.messages = with_system([Message("user", example.prompt), answer], value.get("system"))
