"""N04, data part: rows with nothing left to train never reach the loss unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from frugal.data import build
from frugal.errors import DataError
from tests.support.rows import CHATML, byte_tokenizer, section, write_rows

LONG = {"prompt": "word " * 60, "completion": " ok"}
GOOD = {"prompt": "hi", "completion": " ok"}


def test_all_rows_too_long_stops_with_count_first_row_and_the_length(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [LONG] * 4)
    with pytest.raises(DataError) as stopped:
        build(section(rows, max_length=16), byte_tokenizer(None), seed=0, vocab_size=300)
    message = str(stopped.value)
    assert "4 of 4 rows" in message
    assert "rows.jsonl:1" in message
    assert "data.max_length is 16" in message
    assert "word" not in message


def test_some_rows_too_long_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD, LONG, GOOD, GOOD, LONG, GOOD, GOOD, GOOD])
    data = build(section(rows, max_length=16), byte_tokenizer(None), seed=0, vocab_size=300)
    assert len(data.train) == 6
    assert data.train.num_targets.min() == 4
    (drop,) = data.report.drops
    assert (drop.rows, drop.first.rsplit("/", 1)[-1]) == (2, "rows.jsonl:2")
    assert "truncation" in drop.reason
    assert [data.train_sources[origin].rsplit(":", 1)[1] for origin in data.train.origins] == list("134678")


def test_the_policy_can_be_to_stop(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD, LONG])
    with pytest.raises(DataError, match=r"rows.jsonl:2: nothing left to train after truncation \(1 of 2 rows\)"):
        build(section(rows, max_length=16, on_empty="error"), byte_tokenizer(None), seed=0, vocab_size=300)
    with pytest.raises(DataError, match=r"rows.jsonl:2: longer than data.max_length: 1 of 2 rows"):
        build(section(rows, max_length=16, on_overflow="error"), byte_tokenizer(None), seed=0, vocab_size=300)
    data = build(section(rows, max_length=16, on_overflow="drop"), byte_tokenizer(None), seed=0, vocab_size=300)
    assert len(data.train) == 1


def _chats(tmp_path: Path, *rows: list[tuple[str, str]]) -> Path:
    return write_rows(
        tmp_path / "rows.jsonl",
        [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows],
    )


def test_a_template_without_assistant_markers_still_trains_the_answers(tmp_path: Path) -> None:
    rows = _chats(tmp_path, [("user", "a"), ("assistant", "X")])
    data = build(section(rows), byte_tokenizer(CHATML), seed=0, vocab_size=300)
    assert data.train.num_targets.tolist() == [2]


def test_a_template_whose_markers_enclose_nothing_stops_and_names_the_template(tmp_path: Path) -> None:
    empty = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% generation %}{% endgeneration %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = _chats(tmp_path, *[[("user", "a"), ("assistant", "X")]] * 3)
    with pytest.raises(DataError) as stopped:
        build(section(rows), byte_tokenizer(empty), seed=0, vocab_size=300)
    assert "3 of 3 rows" in str(stopped.value)
    assert "template" in str(stopped.value)


def test_rows_without_an_answer_are_counted(tmp_path: Path) -> None:
    rows = _chats(tmp_path, [("user", "a"), ("assistant", "X")], [("system", "S"), ("user", "b")])
    data = build(section(rows), byte_tokenizer(), seed=0, vocab_size=300)
    assert [(drop.reason, drop.rows) for drop in data.report.drops] == [("nothing to train", 1)]
    assert data.report.drops[0].first.endswith("rows.jsonl:2")
