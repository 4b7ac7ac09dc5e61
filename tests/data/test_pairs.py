"""Preference rows as pairs: forms of files, what is trained, truncation, faults with their row, the wrong objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frugal.data import PreparedData, build, preview_rows
from frugal.errors import ConfigError, DataError, FrugalError
from tests.support.rows import byte_tokenizer, section, write_rows

LONG = {
    "conversations": [
        {"from": "system", "value": "be short"},
        {"from": "human", "value": "first question"},
        {"from": "gpt", "value": "first answer"},
        {"from": "human", "value": "last"},
    ],
    "chosen": {"from": "gpt", "value": "good"},
    "rejected": {"from": "gpt", "value": "bad bad"},
}


def prepared(tmp_path: Path, *rows: dict[str, Any], tokenizer: Any = None, **settings: Any) -> PreparedData:
    path = write_rows(tmp_path / "p.jsonl", rows)
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    return build(section(path, **settings), tokenizer, seed=0, vocab_size=300, objective="dpo")


def texts(data: PreparedData, tokenizer: Any = None) -> list[tuple[str, str]]:
    """(read only, trained) text of every document."""
    tokenizer = tokenizer or byte_tokenizer()
    found = []
    for row in data.train:
        for begin, end in zip(row.doc_starts, row.doc_starts[1:], strict=False):
            ids, mask = row.input_ids[begin:end], row.trained[begin:end]
            found.append((tokenizer.decode(ids[~mask]), tokenizer.decode(ids[mask])))
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"},
        {
            "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
        },
        {"instruction": "q", "chosen": "a", "rejected": "b"},
    ],
)
def test_every_form_is_two_documents_of_one_row(tmp_path: Path, row: dict[str, Any]) -> None:
    data = prepared(tmp_path, row)
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert [read.rstrip("\n") + "\n" for read, _ in texts(data)] == [prompt, prompt]
    assert [trained for _, trained in texts(data)] == ["a<|im_end|>", "b<|im_end|>"]
    assert len(data.train) == 1
    assert data.report.figures["train"]["rows_out"] == 1


def test_history_and_system_are_the_prompt_and_are_not_trained(tmp_path: Path) -> None:
    row = {"instruction": "q", "history": [["h", "earlier"]], "system": "s", "chosen": "a", "rejected": "b"}
    (read, trained), _ = texts(prepared(tmp_path, row))
    begin = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nh<|im_end|>\n<|im_start|>assistant\nearlier"
    assert read.startswith(begin)
    assert trained == "a<|im_end|>"


def test_plain_texts_without_a_template_are_joined(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template=None, eos="<|endoftext|>")
    explicit = {"prompt": "one is", "chosen": " one", "rejected": " two"}
    implicit = {"chosen": "Human: hi\n\nAssistant: hello", "rejected": "Human: hi\n\nAssistant: hey you"}
    data = prepared(tmp_path, explicit, implicit, tokenizer=tokenizer)
    assert texts(data, tokenizer) == [
        ("one is", " one<|endoftext|>"),
        ("one is", " two<|endoftext|>"),
        ("Human: hi\n\nAssistant:", " hello<|endoftext|>"),
        ("Human: hi\n\nAssistant:", " hey you<|endoftext|>"),
    ]


def test_a_prompt_that_is_rendered_already_is_not_rendered_again(tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    data = prepared(tmp_path, {"prompt": prompt, "chosen": "a", "rejected": "b"})
    assert [read for read, _ in texts(data)] == [prompt, prompt]


def test_whole_turns_of_the_prompt_go_first_and_answers_stay(tmp_path: Path) -> None:
    whole = prepared(tmp_path, LONG)
    longest = int(whole.train.document_lengths.max())
    cut = prepared(tmp_path, LONG, max_length=longest - 1)
    kept = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n"
    assert [read.rstrip("\n") + "\n" for read, _ in texts(cut)] == [kept] * 2
    assert [trained for _, trained in texts(cut)] == ["good<|im_end|>", "bad bad<|im_end|>"]
    figures = cut.report.figures["train"]
    assert figures["rows_truncated"] == 1
    assert figures["tokens_in"] - figures["tokens_truncated"] == figures["tokens_out"] == cut.train.tokens


@pytest.mark.parametrize("room", range(-3, 9))
def test_no_length_empties_an_answer_or_tears_the_prompt(tmp_path: Path, room: int) -> None:
    short = {**LONG, "conversations": LONG["conversations"][3:]}
    prompt = int(np.argmax(prepared(tmp_path, short).train[0].trained))
    if room < 1:  # not one token of an answer fits
        with pytest.raises(DataError, match=r"p\.jsonl:1.*data\.max_length"):
            prepared(tmp_path, short, max_length=prompt + room)
        return
    data = prepared(tmp_path, short, max_length=prompt + room)
    for row in data.train:
        assert int(np.argmax(row.trained)) == prompt
        assert np.diff(row.doc_starts).max() <= prompt + room
        assert all(row.trained[begin + prompt] for begin in row.doc_starts[:-1])


def test_plain_prompts_are_cut_from_the_left(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template=None, eos="<|endoftext|>")
    row = {"prompt": "abcdefghijklmnop", "chosen": "1234", "rejected": "56"}
    data = prepared(tmp_path, row, tokenizer=tokenizer, max_length=9)
    assert texts(data, tokenizer) == [("mnop", "1234<|endoftext|>"), ("mnop", "56<|endoftext|>")]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (("same", "same"), "chosen and rejected are the same"),
        ((" ", "b"), "`chosen` is empty"),
        (("a", ""), "`rejected` is empty"),
    ],
)
def test_useless_pairs_are_named_with_their_row(tmp_path: Path, answers: tuple[str, str], reason: str) -> None:
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    bad = {"prompt": "q", "chosen": answers[0], "rejected": answers[1]}
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, good, bad)
    assert f"p.jsonl:2: {reason}" in str(refused.value)
    data = prepared(tmp_path, good, bad, bad, on_bad_row="drop")
    assert len(data.train) == 1
    assert any(reason in line for line in data.report.lines())


def test_the_wrong_objective_is_one_message_with_the_lines_to_write(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ConfigError) as refused:
        build(section(path), byte_tokenizer(), seed=0, vocab_size=300)
    assert "p.jsonl:1" in str(refused.value)
    assert "objective:\n  name: dpo" in str(refused.value)
    path = write_rows(tmp_path / "s.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ConfigError) as refused:
        build(section(path), byte_tokenizer(), seed=0, vocab_size=300, objective="orpo")
    assert "s.jsonl:1 is no preference row, and objective.name is orpo" in str(refused.value)
    assert isinstance(refused.value, FrugalError)
    assert refused.value.exit_code == 2


def test_the_cache_gives_the_same_pairs(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [LONG, {"prompt": "q", "chosen": "a", "rejected": "b"}])
    data, cache = section(path, cache=True), tmp_path / "cache"
    first, again = (
        build(data, byte_tokenizer(), seed=0, vocab_size=300, objective="dpo", cache_dir=cache) for _ in range(2)
    )
    assert again.cache_hits == 1
    assert np.array_equal(first.train.row_docs, again.train.row_docs)
    assert np.array_equal(first.train.input_ids, again.train.input_ids)


def test_preview_shows_both_answers_and_faults(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [LONG, {"prompt": "q", "chosen": "a", "rejected": "a"}])
    shown = preview_rows(section(path, on_bad_row="drop"), byte_tokenizer(), seed=0, objective="dpo")
    assert [row.title.rsplit(" ", 1)[1] for row in shown.rows] == ["chosen", "rejected"] * 2
    assert [row.fault for row in shown.rows] == ["", "", *["chosen and rejected are the same"] * 2]
    assert shown.notes == []
    assert len(shown.lengths) == 2
