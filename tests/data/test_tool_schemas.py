"""D03: tool schemas and calls never get arguments of other rows' tools; genuine nulls stay."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frugal.config import SourceSection
from frugal.data.sources.mixing import load_examples

TOOLS = {"f": {"a": {"type": "integer"}}, "g": {"b": {"type": "string"}}}
CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"a": 1}), ("g", {"b": "x"}), ("f", {"a": None}), ("f", {})]


def row(name: str, arguments: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": TOOLS[name]}
    return {
        "messages": [
            {"role": "user", "content": "call"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
            },
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
    }


ROWS = [row(name, arguments) for name, arguments in CALLS]
ROWS_AS_TEXT = [row(name, json.dumps(arguments)) for name, arguments in CALLS]


def loaded(path: Path) -> tuple[list[str], list[str]]:
    """(JSON of the arguments, JSON of the tools) of every row."""
    examples, _ = load_examples([SourceSection(path=str(path))], on_bad_row="error", seed=0)
    calls = [(example.messages[1].tool_calls or [])[0]["function"] for example in examples]
    return [json.dumps(call["arguments"]) for call in calls], [json.dumps(example.tools) for example in examples]


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("rows", [ROWS, ROWS_AS_TEXT], ids=["objects", "text"])
@pytest.mark.parametrize("write", [write_json, write_jsonl, write_parquet])
def test_no_argument_of_another_tool(tmp_path: Path, write: Any, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / f"a.{write.__name__.removeprefix('write_')}"
    write(path, rows)
    arguments, tools = loaded(path)
    # A struct column cannot tell a null from padding (documented): there the null argument is read as absent.
    third = "{}" if write is write_parquet and rows is ROWS else '{"a": null}'
    assert arguments == ['{"a": 1}', '{"b": "x"}', third, "{}"]
    assert tools == [json.dumps(row["tools"]) for row in rows]


def test_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS_AS_TEXT).save_to_disk(tmp_path / "saved")
    arguments, tools = loaded(tmp_path / "saved")
    assert arguments == ['{"a": 1}', '{"b": "x"}', '{"a": null}', "{}"]
    assert tools == [json.dumps(row["tools"]) for row in ROWS]


def test_order_of_rows_changes_nothing(tmp_path: Path) -> None:
    order = list(range(4)) * 3
    random.Random(0).shuffle(order)
    for write in (write_jsonl, write_parquet):
        path = tmp_path / f"a.{write.__name__.removeprefix('write_')}"
        write(path, [ROWS_AS_TEXT[index] for index in order])
        assert loaded(path)[0] == [json.dumps(CALLS[index][1]) for index in order]


def test_key_order_is_the_files(tmp_path: Path) -> None:
    text = '{"z": 1, "a": {"y": null, "b": []}}'
    write_json(tmp_path / "a.json", [row("f", json.loads(text)), row("f", text)])
    assert loaded(tmp_path / "a.json")[0] == [text, text]
