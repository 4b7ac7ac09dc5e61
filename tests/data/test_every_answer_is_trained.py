"""T03: every answer is trained, with its end token; headers, users and system text are not."""

from __future__ import annotations

import pytest

from frugal.data.rows import Example, Message
from tests.support.rows import CHATML, byte_tokenizer, chat, prepare, trained_texts

# The same text without a generation prompt: a template that knows no add_generation_prompt prints the header itself.
NO_PROMPT = CHATML.split("{% if add_generation_prompt %}")[0]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A careless author's marks enclose the header too.
HEADER_MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m['content'] }}"
    "<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "no prompt": NO_PROMPT, "marked": MARKED, "header marked": HEADER_MARKED}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (("u: a", "a: X", "u: b", "a: Y"), ["X<|im_end|>", "Y<|im_end|>"]),
        (("s: S", "u: a", "a: X", "u: b", "a: Y"), ["X<|im_end|>", "Y<|im_end|>"]),
        (("u: a", "a: X", "u: b"), ["X<|im_end|>"]),
        (("u: a", "a: X", "a: Y"), ["X<|im_end|>", "Y<|im_end|>"]),
        (("a: X", "u: a", "a: Y"), ["X<|im_end|>", "Y<|im_end|>"]),
        (("u: a", "a: ", "u: b", "a: Y"), ["<|im_end|>", "Y<|im_end|>"]),
        (("u: X", "a: X", "u: X", "a: X"), ["X<|im_end|>", "X<|im_end|>"]),
        (("u: assistant\n", "a: assistant\nX"), ["assistant\nX<|im_end|>"]),
        (("u: a",), []),
    ],
)
def test_supervised_text_is_the_answers_and_their_ends(name: str, turns: tuple[str, ...], wanted: list[str]) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    (row,) = prepare(tokenizer, chat(*turns))
    assert not row.fault
    assert trained_texts(tokenizer, row) == wanted


def test_white_space_around_an_answer_is_the_models_to_write_when_the_template_prints_it() -> None:
    tokenizer = byte_tokenizer()
    (row,) = prepare(tokenizer, chat("u: a", "a:  \n X \n"))
    assert trained_texts(tokenizer, row) == [" \n X \n<|im_end|>"]


def test_a_template_that_trims_trains_the_trimmed_text() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("message['content']", "message['content'] | trim"))
    (row,) = prepare(tokenizer, chat("u: a", "a:  \n X \n", "u: b", "a: Y "))
    assert trained_texts(tokenizer, row) == ["X<|im_end|>", "Y<|im_end|>"]


def test_last_turn_only() -> None:
    tokenizer = byte_tokenizer()
    (row,) = prepare(tokenizer, chat("u: a", "a: X", "u: b", "a: Y"), train_on="last")
    assert trained_texts(tokenizer, row) == ["Y<|im_end|>"]


def test_all_trains_every_token_but_the_first() -> None:
    tokenizer = byte_tokenizer()
    (row,) = prepare(tokenizer, chat("u: a", "a: X"), train_on="all")
    assert not row.trained[0]
    assert row.trained[1:].all()


def _switched(*switches: bool | None) -> Example:
    example = chat("u: a", "a: X", "u: b", "a: Y", "u: c", "a: Z")
    for message, switch in zip(example.messages, switches, strict=True):
        message.train = switch
    return example


@pytest.mark.parametrize(
    ("train_on", "switches", "wanted"),
    [
        ("assistant", (None, False, None, None, None, None), ["Y<|im_end|>", "Z<|im_end|>"]),
        ("assistant", (None, None, None, False, None, False), ["X<|im_end|>"]),
        ("last", (None, True, None, None, None, None), ["X<|im_end|>", "Z<|im_end|>"]),
        ("last", (None, None, None, None, None, False), []),
        ("assistant", (True, False, None, False, None, False), ["a"]),
    ],
)
def test_switches_of_turns_win(train_on: str, switches: tuple[bool | None, ...], wanted: list[str]) -> None:
    tokenizer = byte_tokenizer()
    (row,) = prepare(tokenizer, _switched(*switches), train_on=train_on)
    assert trained_texts(tokenizer, row) == wanted


def test_switched_off_turns_are_left_out_of_all() -> None:
    tokenizer = byte_tokenizer()
    (row,) = prepare(tokenizer, _switched(False, False, None, None, None, None), train_on="all")
    untrained = tokenizer.decode(row.ids[1:][~row.trained[1:]].tolist())
    assert untrained == "aX<|im_end|>"


def test_the_system_prompt_is_put_before_conversations_without_one() -> None:
    tokenizer = byte_tokenizer()
    own = Example(
        "messages", "r", 1, messages=[Message("system", "own"), Message("user", "a"), Message("assistant", "X")]
    )
    rows = prepare(tokenizer, chat("u: a", "a: X"), own, system_prompt="be kind")
    assert rows[0].text.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na")
    assert rows[1].text.startswith("<|im_start|>system\nown<|im_end|>\n")
    assert [trained_texts(tokenizer, row) for row in rows] == [["X<|im_end|>"]] * 2
