"""T02: begin-of-sequence: exactly one, never two, never none; a literal one in a message is text."""

from __future__ import annotations

import pytest

from frugal.data import Example, Message, encode_prompt
from frugal.data.encode import RowEncoder, chat_renderer
from frugal.data.tokenizer import TextEncoder
from tests.support.rows import byte_tokenizer, chat, prepare, trained_texts

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIALS = ("<s>", "</s>")


def _tokenizer(*, emits: bool, adds: bool):
    template = "{{ bos_token }}" + PLAIN if emits else PLAIN
    return byte_tokenizer(template, specials=SPECIALS, bos="<s>", eos="</s>", adds_bos=adds)


CELLS = [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0)]


def _leading(ids: list[int], bos: int) -> int:
    count = 0
    while count < len(ids) and ids[count] == bos:
        count += 1
    return count


@pytest.mark.parametrize(("emits", "adds", "wanted"), CELLS)
def test_conversations_begin_with_exactly_one(emits: bool, adds: bool, wanted: int) -> None:
    tokenizer = _tokenizer(emits=emits, adds=adds)
    (row,) = prepare(tokenizer, chat("u: hi", "a: yo"))
    assert _leading(row.ids.tolist(), tokenizer.bos_token_id) == wanted
    assert row.ids.tolist().count(tokenizer.bos_token_id) == wanted
    assert trained_texts(tokenizer, row) == ["yo</s>"]


@pytest.mark.parametrize(("emits", "adds", "wanted"), CELLS)
def test_preference_rows_begin_with_exactly_one(emits: bool, adds: bool, wanted: int) -> None:
    tokenizer = _tokenizer(emits=emits, adds=adds)
    pair = Example("preference", "p.jsonl", 1, messages=[Message("user", "hi")])
    pair.chosen, pair.rejected = [Message("assistant", "yes")], [Message("assistant", "no")]
    row_encoder = RowEncoder(TextEncoder.from_tokenizer(tokenizer), chat_renderer(tokenizer, None))
    for row, answer in zip(row_encoder.preferences([pair])[0], ("yes</s>", "no</s>"), strict=True):
        assert _leading(row.ids.tolist(), tokenizer.bos_token_id) == wanted
        assert trained_texts(tokenizer, row) == [answer]


@pytest.mark.parametrize(("adds", "wanted"), [(True, 1), (False, 0)])
def test_raw_texts_follow_the_tokenizers_own_setting(adds: bool, wanted: int) -> None:
    tokenizer = _tokenizer(emits=True, adds=adds)
    completion = Example("prompt_completion", "p.jsonl", 1, prompt="ab", completion="cd")
    text = Example("text", "t.txt", 1, text="abcd")
    written = Example("text", "t.txt", 2, text="<s>abcd")  # the user wrote one: it is not doubled
    rows = prepare(tokenizer, completion, text, written)
    assert [_leading(row.ids.tolist(), tokenizer.bos_token_id) for row in rows] == [wanted, wanted, 1]
    assert [row.ids.tolist().count(tokenizer.eos_token_id) for row in rows] == [1, 1, 1]


@pytest.mark.parametrize(("emits", "adds", "wanted"), CELLS)
def test_inference_gives_the_ids_that_training_begins_with(emits: bool, adds: bool, wanted: int) -> None:
    tokenizer = _tokenizer(emits=emits, adds=adds)
    (row,) = prepare(tokenizer, chat("s: be kind", "u: hi", "a: yo"))
    prompt = encode_prompt(tokenizer, [Message("system", "be kind"), Message("user", "hi")])
    assert row.ids.tolist()[: len(prompt)] == prompt
    assert tokenizer.decode(row.ids.tolist()[len(prompt) :]) == "yo</s>"


@pytest.mark.parametrize(("emits", "adds", "wanted"), CELLS)
def test_a_literal_begin_token_in_a_message_is_text(emits: bool, adds: bool, wanted: int) -> None:
    tokenizer = _tokenizer(emits=emits, adds=adds)
    (row,) = prepare(tokenizer, chat("u: <s>hi</s>", "a: y</s>o"))
    ids = row.ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == wanted
    assert ids.count(tokenizer.eos_token_id) == 2  # the template's own
    assert row.literals == 3
    assert tokenizer.decode(ids).endswith("[user]<s>hi</s></s>[assistant]y</s>o</s>")
    assert trained_texts(tokenizer, row) == ["y</s>o</s>"]
    prompt = encode_prompt(tokenizer, [Message("user", "<s>hi</s>")])
    assert ids[: len(prompt)] == prompt


def test_a_message_at_the_very_start_of_the_text_cannot_pass_for_the_begin_token() -> None:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}",
        specials=SPECIALS,
        bos="<s>",
        eos="</s>",
        adds_bos=True,
    )
    (row,) = prepare(tokenizer, chat("u: <s>hi", "a: yo"))
    assert row.ids[0] == tokenizer.bos_token_id  # the tokenizer's own
    assert row.ids.tolist().count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(row.ids.tolist()[1:4]) == "<s>"


def test_tokens_that_no_template_uses_stay_special_in_messages() -> None:
    tokenizer = byte_tokenizer(PLAIN, specials=(*SPECIALS, "<mine>"), bos="<s>", eos="</s>")
    (row,) = prepare(tokenizer, chat("u: <mine>", "a: <mine>!"))
    assert row.ids.tolist().count(tokenizer.convert_tokens_to_ids("<mine>")) == 2
    assert row.literals == 0
