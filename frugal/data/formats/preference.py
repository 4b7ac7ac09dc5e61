"""Preference rows: one prompt, a chosen and a rejected answer; or one answer and a verdict on it."""

from __future__ import annotations

from typing import Any

from frugal.data.formats.meaning import verdict_of
from frugal.data.formats.turns import (
    Roles,
    history_of,
    messages_of,
    question_of,
    row_reasoning,
    with_system,
)
from frugal.data.rows import Example, Message, RowError


def fill_preference(value: dict[str, Any], example: Example, roles: Roles) -> None:
    """Fill an example from a row with `chosen` and `rejected`.

    Answers are texts, one message each, or lists of messages. The prompt is `prompt` (text or messages),
    `conversations`, or `history` and `instruction` (+ `input`); without one, the turns that both answers begin with are
    the prompt, or the words of two texts.

    Raises:
        RowError: no prompt, or an answer that is not text or does not end with the assistant.
    """
    example.kind = "preference"
    texts = value["chosen"], value["rejected"]
    plain = all(isinstance(text, str) for text in texts)
    if plain and not any(value.get(key) for key in ("prompt", "conversations", "instruction")):
        value = {**value, **_split(*texts)}
    prompt = _prompt(value, roles)
    chosen = _answer(value["chosen"], "chosen", roles)
    rejected = _answer(value["rejected"], "rejected", roles)
    shared = _shared(chosen, rejected)
    if shared and shared[0].role != "assistant":
        given = [message.content for message in prompt if message.role == "user"]
        if given and given[-1] not in [message.content for message in shared if message.role == "user"]:
            raise RowError("`chosen` begins with turns that are not the prompt's")
        prompt, chosen, rejected = shared, chosen[len(shared) :], rejected[len(shared) :]
    if not prompt:
        raise RowError("a preference row has no prompt", "give prompt, conversations, or turns that both answers share")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or answer[-1].role != "assistant":
            raise RowError(f"`{key}` does not end with an assistant turn")
    if plain and isinstance(value.get("prompt"), str) and not value.get("system"):
        example.prompt = value["prompt"]  # texts, which may also be joined as they are
    example.messages = with_system(prompt, value.get("system"))
    example.chosen, example.rejected = chosen, rejected


def _split(chosen: str, rejected: str) -> dict[str, str]:
    """Two texts that begin alike as prompt and answers; where a word begins alike, it belongs to the answers."""
    if chosen == rejected:
        raise RowError("chosen and rejected are the same")
    shortest = min(len(chosen), len(rejected))
    count = next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest)
    while 0 < count < len(chosen) and not chosen[count - 1].isspace() and not chosen[count].isspace():
        count -= 1
    while count and chosen[count - 1] == " ":  # a space before a word belongs to its token
        count -= 1
    return {"prompt": chosen[:count], "chosen": chosen[count:], "rejected": rejected[count:]} if count else {}


def fill_judged(value: dict[str, Any], example: Example, roles: Roles) -> None:
    """Fill an example from a row with `prompt` and `completion` (texts or messages) and `label`.

    Raises:
        RowError: `label` is no verdict, or the completion is not text and does not end with the assistant.
    """
    example.kind = "preference"
    example.good = verdict_of(value["label"], "label")
    prompt, answer = _prompt(value, roles), _answer(value["completion"], "completion", roles)
    if answer[-1].role != "assistant":
        raise RowError("`completion` does not end with an assistant turn")
    reasoning = row_reasoning(value)
    if reasoning is not None:
        if not isinstance(value["completion"], str):
            raise RowError("reasoning beside lists of messages", "put it into the turn as reasoning_content")
        answer[-1].reasoning_content = reasoning
    texts = isinstance(value["prompt"], str) and isinstance(value["completion"], str)
    if texts and not value.get("system") and not example.tools and reasoning is None:
        example.prompt = value["prompt"]  # texts, which may also be joined as they are
    example.messages = with_system(prompt, value.get("system"))
    example.chosen = example.rejected = answer


def _prompt(value: dict[str, Any], roles: Roles) -> list[Message]:
    for key in ("prompt", "conversations"):
        given = value.get(key)
        if isinstance(given, str) and key == "prompt":
            return [Message("user", given)]
        if given is not None:
            return messages_of(given, key, roles)
    if value.get("instruction") is None:
        return []
    return [*history_of(value), Message("user", question_of(value))]


def _answer(value: Any, key: str, roles: Roles) -> list[Message]:
    if isinstance(value, str):
        return [Message("assistant", value)]
    return messages_of([value] if isinstance(value, dict) else value, key, roles)


def _shared(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Turns that both begin with; each answer keeps at least its last one."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count]
