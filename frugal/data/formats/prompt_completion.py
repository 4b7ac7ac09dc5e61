"""Prompt and completion: two texts joined as they are, or two lists of messages."""

from __future__ import annotations

from typing import Any

from frugal.data.formats.turns import Roles, messages_of, text_of
from frugal.data.rows import Example, RowError


def fill_prompt_completion(value: dict[str, Any], example: Example, roles: Roles) -> None:
    """Two texts as they are, or two lists of messages of which only the completion is trained."""
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple)):
        before = messages_of(prompt, "prompt", roles)
        for message in before:
            message.train = False
        example.messages = before + messages_of(completion, "completion", roles)
        return
    if isinstance(prompt, (list, tuple)) or isinstance(completion, (list, tuple)):
        raise RowError("`prompt` and `completion` are not both texts or both lists of messages")
    example.kind = "prompt_completion"
    example.prompt = text_of(value, "prompt")
    example.completion = text_of(value, "completion")
