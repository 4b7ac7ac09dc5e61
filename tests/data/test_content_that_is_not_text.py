"""D05: content that is not text: what is documented is accepted, the rest is told with reason, count and first line."""

from __future__ import annotations

from pathlib import Path

import pytest

from frugal.config import SourceSection
from frugal.data.report import DataReport
from frugal.data.rows import Example
from frugal.data.sources.mixing import load_examples
from frugal.errors import DataError

USER = '{"role": "user", "content": "q"}'


def load(path: Path, text: str, on_bad_row: str = "error", format: str = "auto") -> tuple[list[Example], DataReport]:
    path.write_text(text, encoding="utf-8")
    source = SourceSection(path=str(path), format=format)
    return load_examples([source], on_bad_row=on_bad_row, seed=0)


def answer(content: str, more: str = "") -> str:
    return f'{{"messages": [{USER}, {{"role": "assistant", "content": {content}{more}}}]}}\n'


def test_documented_forms_are_accepted(tmp_path: Path) -> None:
    call = ', "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]'
    parts = '[{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]'
    text = answer("null", call) + answer(parts) + answer('""') + answer('"\\ud83d\\ude00"')
    examples, report = load(tmp_path / "a.jsonl", text)
    assert [example.messages[1].content for example in examples] == [None, "one two", "", "😀"]
    assert report.drops == []


BAD = {
    '{"a": 1}': "content is an object, not a text",
    "3.5": "content is a number, not a text",
    "true": "content is true/false, not a text",
    "null": "content is null or missing without tool calls",
    "NaN": "NaN and Infinity are not JSON",
    "-Infinity": "NaN and Infinity are not JSON",
    '"half \\ud83d"': "a text holds a lone surrogate escape",
    '[{"type": "image", "url": "x"}]': "content has a part that is not",
}


@pytest.mark.parametrize("content", BAD)
def test_the_rest_is_refused_with_its_line_and_reason(tmp_path: Path, content: str) -> None:
    for name, text in (
        ("a.jsonl", answer('"good"') + answer(content)),
        ("a.json", f"[{answer('1').replace('1', chr(34) * 2)},{answer(content)}]"),
    ):
        with pytest.raises(DataError) as caught:
            load(tmp_path / name, text)
        said = str(caught.value)
        assert said.startswith(f"{tmp_path / name}:2: {BAD[content]}")
        assert '"half' not in said


def test_one_summary_with_counts_and_first_lines(tmp_path: Path) -> None:
    text = "".join(answer(content) for content in (*BAD, *BAD, '"good"'))
    examples, report = load(tmp_path / "a.jsonl", text, on_bad_row="drop")
    assert [example.line for example in examples] == [17]
    found = {drop.reason: (drop.rows, drop.first) for drop in report.drops}
    file = tmp_path / "a.jsonl"
    assert found["content is an object, not a text"] == (2, f"{file}:1")
    assert found["content is a number, not a text"] == (2, f"{file}:2")
    assert found["NaN and Infinity are not JSON"] == (4, f"{file}:5")
    assert report.rows_dropped() == 16


def test_alpaca_answers_as_objects(tmp_path: Path) -> None:
    text = '{"instruction": "i", "output": {"a": 1}}\n' * 3
    for policy in ("error", "drop"):
        with pytest.raises(DataError) as caught:
            load(tmp_path / "a.jsonl", text, on_bad_row=policy)
        assert f"{tmp_path / 'a.jsonl'}:1: `output` is an object, not a text" in str(caught.value)
        assert "README" not in str(caught.value)


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_text_rows_under_a_chat_format_name_the_format_that_fits(tmp_path: Path, policy: str) -> None:
    with pytest.raises(
        DataError, match=r"needs messages; the rows have: text.*They fit format text: set `format: text`"
    ):
        load(tmp_path / "a.jsonl", '{"text": "plain"}\n' * 3, on_bad_row=policy, format="messages")


def test_nan_in_a_table(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a"], "completion": [float("nan")]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:1: `completion` is NaN, not a text"):
        load_examples([SourceSection(path=str(tmp_path / "a.parquet"))], on_bad_row="error", seed=0)
