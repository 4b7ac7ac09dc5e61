"""Random conversations against masks written down piece by piece: every token's label, for three kinds of template."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from frugal.data import Example, Message, encode_prompt
from tests.support.rows import CHATML, byte_tokenizer, prepare

TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
THINKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECES = [
    "a",
    "b",
    " ",
    "\n",
    "\t",
    "é",
    "你",
    "🙂",
    "assistant",
    "user\n",
    "<|im_end|>",
    "<|im_start|>",
    "<|im_start|>assistant\n",
]
PIECES += ["<think>", "### Answer:", "{{ x }}", "{% raw %}", "\\n", "'", '"', "X" * 20]

Parts = list[tuple[str, bool, bool]]
"""(text, trained, special tokens in it are the template's own)"""


def _expected(messages: list[Message], shape: str) -> Parts:
    parts: Parts = []
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    for index, message in enumerate(messages):
        content = message.content or ""
        if shape == "trims":
            content = content.strip()
        answer = message.role == "assistant"
        parts.append((f"<|im_start|>{message.role}\n", False, True))
        if answer and shape == "thinks" and index > last_user:
            parts.append(("<think>\n\n</think>\n\n", True, True))
        parts += [(content, answer, False), ("<|im_end|>", answer, True), ("\n", False, True)]
    return parts


def _conversation(random_: random.Random) -> list[Message]:
    def text() -> str:
        return "".join(random_.choices(PIECES, k=random_.randint(0, 6)))

    messages = [Message("system", text())] if random_.random() < 0.3 else []
    for _ in range(random_.randint(1, 5)):
        messages.append(Message(random_.choice(["user", "assistant"]), text()))
    return messages


@pytest.mark.parametrize(("shape", "template"), [("plain", CHATML), ("trims", TRIMS), ("thinks", THINKS)])
def test_every_label_of_random_conversations(shape: str, template: str) -> None:
    tokenizer = byte_tokenizer(template)
    core = tokenizer.backend_tokenizer

    def ids(text: str, own: bool) -> list[int]:
        core.encode_special_tokens = not own
        try:
            return list(core.encode(text, add_special_tokens=False).ids)
        finally:
            core.encode_special_tokens = False

    random_ = random.Random(shape)
    conversations = [_conversation(random_) for _ in range(300)]
    rows = prepare(tokenizer, *(Example("messages", "r", 1, messages=messages) for messages in conversations))
    for messages, row in zip(conversations, rows, strict=True):
        wanted_ids: list[int] = []
        wanted: list[bool] = []
        for text, trained, own in _expected(messages, shape):
            new = ids(text, own)
            wanted_ids += new
            wanted += [trained] * len(new)
        wanted[0] = False
        assert not row.fault, (messages, row.fault)
        assert row.ids.tolist() == wanted_ids, messages
        assert row.trained.tolist() == wanted, messages


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: byte_tokenizer(THINKS)])
def test_prompts_of_random_conversations_begin_their_rows(make: Callable[[], object]) -> None:
    tokenizer = make()
    random_ = random.Random(7)
    for _ in range(60):
        messages = [*_conversation(random_), Message("user", "q"), Message("assistant", "A" + random_.choice(PIECES))]
        (row,) = prepare(tokenizer, Example("messages", "r", 1, messages=messages))
        prompt = encode_prompt(tokenizer, messages[:-1])
        assert row.ids.tolist()[: len(prompt)] == prompt
