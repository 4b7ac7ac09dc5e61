"""T04: where the answer begins comes from offsets in the text, never from searching ids."""

from __future__ import annotations

import pytest

from frugal.data.rows import Example
from tests.support.rows import byte_tokenizer, prepare, trained_texts

# Ċ is a line break and Ġ a space, as byte-level BPE writes them.
MERGES = [("Ċ", "#"), ("Ċ#", "#"), (":", "Ġ")]


def _tokenizer():
    return byte_tokenizer(None, merges=MERGES)


def _row(prompt: str, completion: str, **options):
    tokenizer = _tokenizer()
    return tokenizer, prepare(
        tokenizer, Example("prompt_completion", "r.jsonl", 1, prompt=prompt, completion=completion), **options
    )[0]


@pytest.mark.parametrize("marker", ["### Answer:", "\n### Answer:"])
def test_the_marker_may_tokenise_as_it_likes(marker: str) -> None:
    tokenizer, row = _row("hello" + marker, " 42")
    assert trained_texts(tokenizer, row) == [" 42<|im_end|>"]


def test_a_token_never_joins_the_end_of_the_prompt_and_the_answer() -> None:
    tokenizer, row = _row("hello\n### Answer:", " 42")
    joined = tokenizer("hello\n### Answer: 42")["input_ids"]
    assert tokenizer.convert_tokens_to_ids(":Ġ") in joined  # alone, the tokenizer would join colon and space
    prompt = tokenizer("hello\n### Answer:")["input_ids"]
    assert row.ids.tolist()[: len(prompt)] == prompt  # as inference tokenises it
    assert tokenizer.convert_tokens_to_ids("Ċ##") in prompt
    assert row.trained.tolist() == [False] * len(prompt) + [True] * 4


@pytest.mark.parametrize("length", [3, 10, 50])
def test_masked_prefixes_have_the_prompts_length(length: int) -> None:
    _, row = _row("x" * length, "yz")
    assert row.trained.tolist() == [False] * length + [True] * 3
    assert len(row.ids) == length + 3


def test_an_end_token_that_the_completion_has_is_not_doubled() -> None:
    tokenizer, row = _row("a", "b<|im_end|>")
    assert tokenizer.decode(row.ids.tolist()) == "ab<|im_end|>"
    assert trained_texts(tokenizer, row) == ["b<|im_end|>"]


def test_all_trains_the_prompt_too() -> None:
    _, row = _row("abc", "de", train_on="all")
    assert row.trained.tolist() == [False, True, True, True, True, True]


def test_characters_of_several_tokens_are_trained_whole() -> None:
    tokenizer, row = _row("é", "é🙂é")
    assert trained_texts(tokenizer, row) == ["é🙂é<|im_end|>"]
    assert row.trained.tolist() == [False] * 2 + [True] * 9


def test_trimmed_offsets_do_not_hide_a_token_that_joins_prompt_and_answer() -> None:
    """Byte-level tokenizers may leave a leading space out of a token's offsets: the token covers it all the same."""
    from tokenizers import processors

    tokenizer = byte_tokenizer(None, merges=[("Ġ", "4"), ("Ġ4", "2")])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    joined = Example("prompt_completion", "r.jsonl", 1, prompt="Answer: ", completion="42")
    apart = Example("prompt_completion", "r.jsonl", 2, prompt="Answer:", completion=" 42")
    first, second = prepare(tokenizer, joined, apart)
    assert trained_texts(tokenizer, first) == ["42<|im_end|>"]
    assert first.ids.tolist()[:8] == tokenizer("Answer: ")["input_ids"]
    assert trained_texts(tokenizer, second) == [" 42<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids("Ġ42") in second.ids.tolist()
