"""Keys that change what a row means are used or refused (F07, U01, U02), typed parts are read (U03), other names of
columns are recognised (U04), and what nobody reads is named (kind 2)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frugal.config import SourceSection
from frugal.data.formats.meaning import MEDIA, VERDICTS
from frugal.data.pipeline import check_kinds
from frugal.data.report import DataReport
from frugal.data.rows import Example, RawRow
from frugal.data.sources.mixing import load_examples
from frugal.data.sources.read_columns import read_parquet
from frugal.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "output": "a"},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "text": {"text": "q a"},
}


def load(
    path: Path, rows: list[dict[str, Any]], *, drop: bool = False, **options: Any
) -> tuple[list[Example], DataReport]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = SourceSection(path=str(path), **options)
    return load_examples([source], on_bad_row="drop" if drop else "error", seed=0)


def refusal(path: Path, row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, [row], **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    ("key", "value"),
    [("label", False), ("label", True), ("kto_tag", False), ("rejected", "bad"), ("score", 0.1), ("rating", 1)],
)
def test_a_verdict_is_never_trained_as_good(tmp_path: Path, name: str, key: str, value: Any) -> None:
    """U01."""
    if name == "prompt_completion" and key == "label":  # of the format judged, which only objective kto trains
        examples, _ = load(tmp_path / "a.jsonl", [{**ROWS[name], key: value}])
        assert [example.good for example in examples] == [value]
        with pytest.raises(ConfigError, match=r"name: kto[^$]*ignore_columns: \[label\]"):
            check_kinds(examples, "sft")
        return
    said = refusal(tmp_path / "a.jsonl", {**ROWS[name], key: value})
    assert f"`{key}` says how good" in said
    assert f"ignore_columns: [{key}]" in said
    assert "objective.name: kto" in said
    assert len(load(tmp_path / "a.jsonl", [{**ROWS[name], key: value}], ignore_columns=[key])[0]) == 1
    assert len(load(tmp_path / "a.jsonl", [{**ROWS[name], key: None}])[0]) == 1


@pytest.mark.parametrize("key", MEDIA)
def test_rows_with_pictures_or_sound_are_refused(tmp_path: Path, key: str) -> None:
    """F07: a value refuses the row, an empty one does not."""
    bad, good = {**ROWS["messages"], key: ["a.jpg"]}, {**ROWS["messages"], key: []}
    assert "only text is trained" in refusal(tmp_path / "a.jsonl", bad)
    examples, report = load(tmp_path / "a.jsonl", [bad, bad, good], drop=True)
    assert [example.line for example in examples] == [3]
    assert report.rows_dropped() == 2
    turn = {"messages": [{**CHAT[0], key: ["a.jpg"]}, CHAT[1]]}
    assert "turn 1" in refusal(tmp_path / "a.jsonl", turn)


@pytest.mark.parametrize("key", ["train", "weight", "loss_weight", "loss"])
@pytest.mark.parametrize(("off", "on"), [(0, 1), (0.0, 1.0), (False, True)])
def test_switches_mean_the_same(tmp_path: Path, key: str, off: Any, on: Any) -> None:
    """U02: in a turn and of a row."""
    turns = [CHAT[0], {**CHAT[1], key: off}, CHAT[0], {**CHAT[1], key: on}]
    examples, _ = load(tmp_path / "a.jsonl", [{"messages": turns}])
    assert [message.train for message in examples[0].messages] == [None, False, None, True]
    examples, report = load(tmp_path / "a.jsonl", [{**ROWS["text"], key: off}, {**ROWS["text"], key: on}])
    assert [example.line for example in examples] == [2]
    assert report.rows_read() == len(examples) + report.rows_dropped() == 2


@pytest.mark.parametrize("value", [0.5, 2, -1, "half", [1]])
def test_other_weights_are_refused(tmp_path: Path, value: Any) -> None:
    """U02: a value between is not trained as 1 or as 0."""
    for row in ({"messages": [CHAT[0], {**CHAT[1], "loss_weight": value}]}, {**ROWS["alpaca"], "loss_weight": value}):
        assert "`loss_weight`" in refusal(tmp_path / "a.jsonl", row)
    both = {"messages": [CHAT[0], {**CHAT[1], "weight": 0, "train": True}]}
    assert "contradict" in refusal(tmp_path / "a.jsonl", both)


def test_context_is_read_or_refused(tmp_path: Path) -> None:
    """Tools, system text and reasoning that a format does not read refuse the row."""
    tools = [{"name": "f", "parameters": {}}]
    for key, value in {"tools": tools, "system": "s", "reasoning": "r", "functions": tools}.items():
        assert f"`{key}`" in refusal(tmp_path / "a.jsonl", {**ROWS["text"], key: value})
    assert "`reasoning`" in refusal(tmp_path / "a.jsonl", {**ROWS["messages"], "reasoning": "r"})
    row = {**ROWS["alpaca"], "functions": tools, "system_prompt": "s", "reasoning": "r"}
    (example,), _ = load(tmp_path / "a.jsonl", [row])
    assert example.tools is not None
    assert [message.content for message in example.messages] == ["s", "q", "a"]
    assert example.messages[-1].reasoning_content == "r"


@pytest.mark.parametrize("key", ["value", "text", "content"])
def test_typed_parts(tmp_path: Path, key: str) -> None:
    """U03."""
    parts = [
        {"type": "reasoning", key: "because"},
        {"type": "text", key: "a"},
        {"type": "tool_call", key: '{"name": "f", "arguments": {"x": 1}}'},
    ]
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", key: "q"}]},
                {"role": "assistant", "content": parts},
            ]
        }
    ]
    (example,), _ = load(tmp_path / "a.jsonl", rows)
    question, answer = example.messages
    assert (question.content, answer.content, answer.reasoning_content) == ("q", "a", "because")
    assert answer.tool_calls == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    parts[1]["type"] = "hologram"
    assert "part of type 'hologram'" in refusal(tmp_path / "a.jsonl", rows[0])
    assert "its keys: type, words" in refusal(
        tmp_path / "a.jsonl",
        {"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "text", "words": "a"}]}]},
    )


def test_a_fault_of_every_row_is_told_with_its_count(tmp_path: Path) -> None:
    """U03: 60 rows with one fault are a few lines and a number."""
    with pytest.raises(DataError) as caught:
        load(tmp_path / "a.jsonl", [{**ROWS["messages"], "label": False}] * 60)
    assert str(caught.value).count("says how good") == 1
    assert "60 of 60 rows" in str(caught.value)
    assert "[60 rows like this]" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"prompt": "q", "response": "a"}, ["q", "a"]),
        ({"question": "q", "answer": "a"}, ["q", "a"]),
        ({"Question": "q", "Answer": "a"}, ["q", "a"]),
        ({"query": "q", "response": "a", "id": 3}, ["q", "a"]),
        ({"instruction": "q", "context": "c", "response": "a", "category": "x"}, ["q\nc", "a"]),
        ({"instruction": "q", "context": "", "response": "a"}, ["q", "a"]),
        ({"system_prompt": "s", "question": "q", "response": "a"}, ["s", "q", "a"]),
    ],
)
def test_other_names_of_question_and_answer(tmp_path: Path, row: dict[str, Any], contents: list[str]) -> None:
    """U04."""
    (example,), report = load(tmp_path / "a.jsonl", [row])
    assert [message.content for message in example.messages] == contents
    assert "columns: {" in report.notes[0]


def test_unclear_names_get_the_line_that_works(tmp_path: Path) -> None:
    """U04: two answers: the message writes a `columns:` line, and that line works."""
    row = {"problem": "q", "solution": "long", "answer": "a"}
    said = refusal(tmp_path / "a.jsonl", row)
    assert "`columns: {prompt: problem, completion: answer}`" in said
    (example,), _ = load(tmp_path / "a.jsonl", [row], columns={"prompt": "problem", "completion": "answer"})
    assert (example.prompt, example.completion) == ("q", "a")


def test_null_answers_say_null(tmp_path: Path) -> None:
    """U20: rows whose answer is null are alpaca rows without an answer, not rows of an unknown format."""
    with pytest.raises(DataError, match="`output` is null"):
        load(tmp_path / "a.jsonl", [{"instruction": "q", "input": "", "output": None}] * 150)


def test_columns_that_nobody_reads_are_named_once(tmp_path: Path) -> None:
    """Kind 2: name and number of rows, in the lines of the log and in what the manifest holds."""
    rows = [{**ROWS["alpaca"], "id": 1, "url": "u"}, {**ROWS["alpaca"], "id": 2, "url": ""}]
    _, report = load(tmp_path / "a.jsonl", rows)
    assert report.to_json()["sources"][0]["ignored"] == {"id": 2, "url": 1}
    assert [line for line in report.lines() if "not used" in line] == [
        f"note: columns of {tmp_path}/a.jsonl that are not used (rows): id (2), url (1)"
    ]


def test_random_mixtures_of_rows_and_keys(tmp_path: Path) -> None:
    """Property: a row is trained exactly when no key says otherwise, and every row is somewhere."""
    draw = random.Random(3)
    harmless: list[tuple[str, Any]] = [
        ("id", 1),
        ("images", []),
        ("label", None),
        ("weight", 1),
        ("train", True),
        ("source", "x"),
    ]
    for trial in range(60):
        name = draw.choice(list(ROWS))
        rows, wanted = [], []
        for number in range(1, draw.randint(2, 12)):
            row = dict(ROWS[name])
            row.update(draw.sample(harmless, draw.randint(0, 4)))
            kind = draw.choice(["good", "good", "verdict", "media", "off", "between"])
            if kind == "verdict":
                row[draw.choice([key for key in VERDICTS if key != "chosen"])] = draw.choice(
                    [False, True, 0, 1, 0.5, "bad"]
                )
            elif kind == "media":
                row[draw.choice(MEDIA)] = draw.choice(["a.png", ["a.png"], {"bytes": "x"}])
            elif kind == "off":
                row = {key: value for key, value in row.items() if key not in ("weight", "train")}
                row[draw.choice(["weight", "loss_weight", "train"])] = draw.choice([0, False, 0.0])
            elif kind == "between":
                row[draw.choice(["weight", "loss_weight", "train"])] = draw.choice([0.3, 7, "x"])
            else:
                wanted.append(number)
            rows.append(row)
        path = tmp_path / f"{trial}.jsonl"
        try:
            examples, report = load(path, rows, drop=True, format=name)
        except DataError:
            assert not wanted
            continue
        assert [example.line for example in examples] == wanted
        assert report.rows_read() == len(examples) + report.rows_dropped()


@pytest.mark.parametrize(
    "text",
    [
        ",prompt,completion\n0,a,b\n1,c,d\n",
        "prompt,completion,\na,b,\nc,d,\n",
        ",prompt,,completion,\n0,a,,b,\n1,c,x,d,\n",
        "sep=,\nprompt,completion\na,b\nc,d\n",
        "sep=;\r\nprompt;completion\r\na;b\r\nc;d\r\n",
        "prompt,completion,score\na,b,nan\nc,d,NaN\n",
        "prompt\tcompletion\na\tb\nc\td\n",
    ],
)
def test_tables_as_pandas_and_spreadsheets_write_them(tmp_path: Path, text: str) -> None:
    """F17."""
    path = tmp_path / ("rows.tsv" if "\t" in text else "rows.csv")
    path.write_bytes(text.encode())
    examples, report = load_examples([SourceSection(path=str(path))], on_bad_row="error", seed=0)
    assert [(one.prompt, one.completion) for one in examples] == [("a", "b"), ("c", "d")]
    assert any("column 1 (no name) (2)" in note for note in report.notes) == text.startswith(",")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt,completion\na,nan\n", "rows.csv:2: `completion` is NaN, not a text"),
        ("prompt,\na,b\n", "column 2 (no name)"),
        ("messages\n\"[{'role': 'user', 'content': 'hi'}]\"\n", "single quotes; JSON needs double quotes"),
    ],
)
def test_cells_that_are_no_text(tmp_path: Path, text: str, said: str) -> None:
    """F17: a missing value and Python's quotes are faults of the row, and a needed column without a name is told."""
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_examples([SourceSection(path=str(path))], on_bad_row="error", seed=0)
    assert said in str(caught.value)


def test_bytes_of_pictures_are_not_read(tmp_path: Path) -> None:
    """F07: a Parquet file with pictures refuses its rows without reading the pictures."""
    pictures = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    values = [[{"bytes": b"x" * 100, "path": None}], [], None]
    table = pa.table({"text": ["a", "b", "c"], "images": pa.array(values, pictures)})
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = [row.value for row in read_parquet(tmp_path / "rows.parquet", "rows") if isinstance(row, RawRow)]
    assert rows == [{"text": "a", "images": [{}]}, {"text": "b", "images": []}, {"text": "c"}]
    source = SourceSection(path=str(tmp_path / "rows.parquet"))
    assert [one.text for one in load_examples([source], on_bad_row="drop", seed=0)[0]] == ["b", "c"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize(("encoding", "told"), [("cp1252", "WINDOWS-1252"), ("latin-1", "ISO-8859-1")])
def test_other_encodings_are_told_with_the_way_out(tmp_path: Path, name: str, encoding: str, told: str) -> None:
    """U20: file, line, offset in the file, probable encoding, command; no advice to drop rows."""
    mark = "é" if encoding == "cp1252" else "é\x81"
    rows = {"a.jsonl": '{"text": "a"}\n\n{"text": "x%s"}\n', "a.csv": "text\na\nx%s\n", "a.txt": "a\n\nx%s"}
    content = (rows.get(name, '[{"text": "a"},\n\n{"text": "x%s"}]') % mark).encode(encoding)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_examples([SourceSection(path=str(tmp_path / name))], on_bad_row="error", seed=0)
    said = str(caught.value)
    line = content.count(b"\n", 0, content.index(b"\xe9")) + 1
    assert f"{name}:{line}: not UTF-8 text" in said
    offset = content.index(b"\xe9")
    assert f"offset {offset} of the file" in said
    assert f"iconv -f {told} -t UTF-8" in said
    assert "on_bad_row" not in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_told(tmp_path: Path, name: str, encoding: str) -> None:
    """U20: with and without a byte order mark."""
    (tmp_path / name).write_bytes('{"text": "abc"}\n'.encode(encoding))
    with pytest.raises(DataError, match=r"offset 0.*iconv -f UTF-(16|32)"):
        load_examples([SourceSection(path=str(tmp_path / name))], on_bad_row="error", seed=0)
