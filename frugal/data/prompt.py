"""The ids that inference gives to the model: the same rendering and the same rules for special tokens as in
training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frugal.data.literals import literal_spans
from frugal.data.prepare import with_system
from frugal.data.render import ChatRenderer
from frugal.data.sandbox import TemplateRefused
from frugal.data.templates import choose_template
from frugal.data.tokenize import TextEncoder, adds_bos, one_bos, special_tokens_of
from frugal.data.types import Message
from frugal.errors import DataError


def chat_renderer(tokenizer: Any, chat_template: str | None, *, all_alpaca: bool = False) -> ChatRenderer:
    """The renderer for a tokenizer and `data.chat_template`."""
    chosen = choose_template(chat_template, tokenizer, all_alpaca=all_alpaca)
    return ChatRenderer(chosen.source, chosen.name, *special_tokens_of(tokenizer))


def encode_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    chat_template: str | None = None,
    system_prompt: str | None = None,
) -> list[int]:
    """Ids of a conversation that waits for an answer: a prefix of the ids that training makes of it with its answer.

    Raises:
        DataError: the template refuses the conversation, or it has lone surrogates (undecodable bytes of a terminal).
        ConfigError: there is no template.
    """
    renderer = chat_renderer(tokenizer, chat_template)
    try:
        turns, known_tools = renderer.turns(with_system(messages, system_prompt), tools)
        text = renderer.text(turns, known_tools, prompt=True)
        literals = literal_spans(renderer, turns, known_tools, text, prompt=True)
    except TemplateRefused as fault:
        raise DataError(f"The chat template ({renderer.name}) cannot render the conversation: {fault}") from None
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError("The conversation holds bytes that are not UTF-8. Write it in UTF-8.")
    if literals:
        encoder = TextEncoder.from_tokenizer(tokenizer)
        return [int(token_id) for token_id in encoder.encode([text], literals=[literals])[0].ids]
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return one_bos(ids, tokenizer.bos_token_id, adds_bos=adds_bos(tokenizer))
