"""Mixing, holding out, the report, and how faults are told."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from frugal.config import DataSection, SourceSection
from frugal.data.report import DataReport, SourceCount
from frugal.data.sources.mixing import load_examples, load_train_eval
from frugal.errors import DataError


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(path: Path, count: int, letter: str) -> str:
    return write(path, [{"text": f"{letter}{number}"} for number in range(count)])


def load(*sources: SourceSection, on_bad_row: str = "error", seed: int = 0) -> tuple[list[str], DataReport]:
    examples, report = load_examples(sources, on_bad_row=on_bad_row, seed=seed)
    return [example.text for example in examples], report


def test_weights(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 10, "a"), numbered(tmp_path / "b.jsonl", 7, "b")
    texts, report = load(SourceSection(path=a, weight=0.5), SourceSection(path=b, weight=2))
    counts = Counter(texts)
    assert sorted(counts.values()) == [1] * 5 + [2] * 7
    assert [source.rows_taken for source in report.sources] == [5, 14]
    assert sum(load(SourceSection(path=a, weight=2.3))[0].count(f"a{n}") == 3 for n in range(10)) == 3
    assert len(load(SourceSection(path=a, weight=0.001))[0]) == 1
    assert load(SourceSection(path=a))[0] == [f"a{n}" for n in range(10)]


def test_mixing_depends_on_the_seed_alone(tmp_path: Path) -> None:
    a = SourceSection(path=numbered(tmp_path / "a.jsonl", 50, "a"), weight=0.5)
    assert load(a, seed=1) == load(a, seed=1)
    assert set(load(a, seed=1)[0]) != set(load(a, seed=2)[0])
    # These rows, on every machine and with every version of anything.
    small = SourceSection(path=numbered(tmp_path / "b.jsonl", 8, "b"), weight=0.5)
    assert load(small, seed=7)[0] == ["b0", "b1", "b3", "b5"]


def test_held_out_rows_are_in_no_copy(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 20, "a"), numbered(tmp_path / "b.jsonl", 20, "b")
    sources = [SourceSection(path=a, weight=3), SourceSection(path=b, weight=0.5)]
    train, held_out, report = load_train_eval(DataSection(train=sources, eval_split=0.25), seed=3)
    assert len(held_out) == 10
    kept, out = {row.text for row in train}, {row.text for row in held_out}
    assert len(out) == 10
    assert not kept & out
    assert sum(source.rows_held_out for source in report.sources) == 10
    assert len(load_train_eval(DataSection(train=sources, eval_split=7), seed=3)[1]) == 7
    assert load_train_eval(DataSection(train=sources), seed=3)[1] == []
    with pytest.raises(DataError, match="eval_split: 40 holds out 40 of 40 rows, which leaves none"):
        load_train_eval(DataSection(train=sources, eval_split=40), seed=3)


def test_eval_sources_win(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 5, "a"), numbered(tmp_path / "b.jsonl", 5, "b")
    data = DataSection(train=[SourceSection(path=a)], eval=[SourceSection(path=b)], eval_split=0.5)
    train, held_out, report = load_train_eval(data, seed=0)
    assert [row.text for row in train] == [f"a{n}" for n in range(5)]
    assert [row.text for row in held_out] == [f"b{n}" for n in range(5)]
    assert [source.part for source in report.sources] == ["train", "eval"]


def test_max_rows_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": "y"}\n{broken\n', encoding="utf-8")
    assert load(SourceSection(path=str(path), max_rows=2))[0] == ["x", "y"]


def test_all_faults_of_all_sources_in_one_error(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"text": "x"}, {"text": 7}, {"no": 1}])
    b = write(tmp_path / "b.jsonl", [{"text": "x"}] + [{"text": None}] * 30)
    with pytest.raises(DataError) as caught:
        load(SourceSection(path=a), SourceSection(path=b))
    lines = str(caught.value).splitlines()
    assert lines[0] == "32 of 34 rows cannot be used:"
    assert lines[1] == f"{a}:2: `text` is a number, not a text"
    assert lines[2] == f"{a}:3: `text` is missing (the row has: no)"
    assert lines[3].startswith(f"{b}:2: `text` is null")
    assert lines[3].endswith("[30 rows like this]")
    assert lines[4:] == [
        "Correct them, or set `data.on_bad_row: drop` to leave them out and count them.",
    ]


def test_dropped_rows_are_counted_by_reason(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"text": "x"}, {"text": 7}, [], {"text": 8}, {"no": 1}])
    texts, report = load(SourceSection(path=a), on_bad_row="drop")
    assert texts == ["x"]
    assert [(drop.reason, drop.rows, drop.first) for drop in report.drops] == [
        ("`text` is a number, not a text", 2, f"{a}:2"),
        ("the row is a list, not an object", 1, f"{a}:3"),
        ("`text` is missing", 1, f"{a}:5"),
    ]
    assert (report.rows_read(), report.rows_dropped(), report.sources[0].rows_good) == (5, 4, 1)


def test_account_as_json_and_as_table(tmp_path: Path) -> None:
    a = write(tmp_path / "[red].jsonl", [{"messages": [{"role": "Human", "content": "Hi, {{name}}"}]}, {"messages": 1}])
    _, report = load(SourceSection(path=a), on_bad_row="drop")
    report.drop("no trained token left", f"{a}:1", tokens=9)
    report.drop("no trained token left", f"{a}:2", tokens=3, rows=2)
    report.add("train", tokens=1200)
    report.add("train", tokens=34)
    report.set("train", rows_out=1)
    again = DataReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report
    screen = io.StringIO()
    Console(file=screen, width=300).print(report)
    said = screen.getvalue()
    for part in ("[red].jsonl", "no trained token left", "1,234", "roles in", "Human -> user", "note: 1 row contains"):
        assert part in said
    assert [(drop.rows, drop.tokens) for drop in report.drops][-1] == (3, 12)


def test_placeholders_are_noted(tmp_path: Path) -> None:
    rows = [
        {"instruction": "hi", "input": "", "output": "I am {{name}} by {{ author }}."},
        {"instruction": "who", "input": "", "output": "{{name}}, {{name}}"},
        {"instruction": "plain", "input": "", "output": "{ {x} }"},
    ]
    a = write(tmp_path / "a.jsonl", rows)
    examples, report = load_examples([SourceSection(path=a)], on_bad_row="error", seed=0)
    assert len(examples) == 3
    assert report.notes == [
        f"2 rows contain {{{{name}}}} (first: {a}:1): fill it in before training",
        f"1 row contains {{{{author}}}} (first: {a}:1): fill it in before training",
    ]


def test_shapes_of_other_tools_files(tmp_path: Path) -> None:
    """The same shapes as LLaMA-Factory's demo files: one pretty-printed array each."""
    tool = json.dumps([{"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}])
    call = json.dumps({"name": "f", "arguments": {}})
    human = {"from": "human", "value": "q"}
    files = {
        "alpaca": {"instruction": "i", "input": "", "output": "o"},
        "sharegpt": {
            "conversations": [human, {"from": "function_call", "value": call}, {"from": "observation", "value": "1"}],
            "tools": tool,
        },
        "preference": {
            "conversations": [human],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    }
    for name, row in files.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([row] * 3, indent=2), encoding="utf-8")
        examples, report = load_examples([SourceSection(path=str(path))], on_bad_row="error", seed=0)
        assert len(examples) == 3
        assert report.sources[0].format == name


def test_the_account_in_plain_lines() -> None:
    report = DataReport()
    report.sources.append(SourceCount("a.jsonl", "train", "messages", rows_read=1200, rows_held_out=20))
    report.drop("nothing to train", "a.jsonl:7", rows=3)
    report.set("train", rows_out=1177, tokens_out=50_000, tokens_trained=20_000)
    report.set("eval", rows_out=20)
    report.note("mind this")
    assert report.lines() == [
        "train: 1,200 rows of a.jsonl (messages), 20 held out -> 1,177 rows, 50,000 tokens, 20,000 trained",
        "eval: 20 rows",
        "left out of train: 3 rows: nothing to train; first: a.jsonl:7",
        "note: mind this",
    ]
