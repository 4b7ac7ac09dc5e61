"""D07: bad lines are named as file:line with a reason and without the row's text; odd but good files load."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from frugal.config import SourceSection
from frugal.data.sources.mixing import load_examples
from frugal.errors import DataError

GOOD = '{"prompt": "SECRET", "completion": "SECRET"}'


def count(path: Path, policy: str = "error") -> int:
    return len(load_examples([SourceSection(path=str(path))], on_bad_row=policy, seed=0)[0])


def said(path: Path, content: str | bytes, policy: str = "error") -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    with pytest.raises(DataError) as caught:
        count(path, policy)
    message = str(caught.value)
    assert "SECRET" not in message
    return message.replace(str(path), path.name)


LINES = {
    "ends early": ('\n%s\n\n{"prompt": ', "a.jsonl:4: not valid JSON (column 12: it ends in the middle of a value)"),
    "an empty array": ("%s\n[]\n", "a.jsonl:2: the row is a list, not an object"),
    "a number": ("%s\n7\n", "a.jsonl:2: the row is a number, not an object"),
    "trailing comma": (
        '%s\n{"prompt": "SECRET",}\n',
        "a.jsonl:2: not valid JSON (column 20: a comma before the closing",
    ),
    "comma after": ("%s,\n%s\n", "a.jsonl:1: not valid JSON (column 45: a comma after the object; JSON Lines has one"),
    "single quotes": (
        "%s\n{'prompt': 'SECRET'}\n",
        "a.jsonl:2: not valid JSON (column 2: single quotes; JSON needs double",
    ),
    "python words": ('%s\n{"prompt": None}\n', "a.jsonl:2: not valid JSON (column 12: a Python word; JSON writes null"),
    "two on a line": ("%s\n%s %s\n", "a.jsonl:2: not valid JSON (column 46: more text after the value)"),
    "open text": ('%s\n{"prompt": "SECRET\n', "a.jsonl:2: not valid JSON (column 12: a text that starts here has no"),
    "key twice": (
        '%s\n{"a": "SECRET", "a": 1}\n',
        "a.jsonl:2: a key is given twice in one object ('a'; keep one of them)",
    ),
    "too large": ('%s\n{"a": 1e999}\n', "a.jsonl:2: a number is too large (write it as text, in quotes)"),
    "too many digits": (
        '%s\n{"a": ' + "9" * 5000 + "}\n",
        "a.jsonl:2: a number has too many digits (write it as text, in quotes)",
    ),
    "too deep": (
        "%s\n" + "[" * 100_000 + "\n",
        "a.jsonl:2: not valid JSON (column 1: nested too deeply: hundreds of brackets",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_line_and_reason(tmp_path: Path, name: str) -> None:
    text, expected = LINES[name]
    assert said(tmp_path / "a.jsonl", text.replace("%s", GOOD)).startswith(expected)


def test_not_utf8_names_line_and_byte(tmp_path: Path) -> None:
    bad = b'{"prompt": "\xe4", "completion": ""}'
    expected = ":2: not UTF-8 text (byte 0xe4, byte 13 of the line, offset "
    good = GOOD.encode()
    assert said(tmp_path / "a.jsonl", good + b"\n" + bad).startswith(f"a.jsonl{expected}")
    assert said(tmp_path / "a.json", b"[" + good + b",\n" + bad + b"]").startswith(f"a.json{expected}")
    assert said(tmp_path / "b.jsonl", GOOD.encode("utf-16")).startswith("b.jsonl: the file is UTF-16 (")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.txt"])
@pytest.mark.parametrize("content", ["", " \n\n\t\n"])
def test_empty_file_says_empty(tmp_path: Path, name: str, content: str) -> None:
    assert said(tmp_path / name, content).startswith(f"{name}: the file is empty.")
    assert said(tmp_path / f"{name}.gz", gzip.compress(content.encode())).startswith(f"{name}.gz: the file is empty.")


def test_good_odd_files_load(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n\n{GOOD}\n   \n{GOOD}", encoding="utf-8")
    assert count(path) == 2
    path.write_text(json.dumps({"prompt": "x" * 8_000_000, "completion": "y"}) + "\n" + GOOD, encoding="utf-8")
    assert count(path) == 2
    path.write_text(f"[{GOOD}, {GOOD}]", encoding="utf-8")
    assert count(path) == 2
    path.write_text(f"[\n{GOOD},\n{GOOD}\n]\n", encoding="utf-8")
    assert count(path) == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_every_kind_of_line_end(tmp_path: Path, name: str, end: str) -> None:
    """Lines that end in a carriage return alone come from old spreadsheets; rows and their numbers are the same."""
    lines = {
        "a.jsonl": ['{"text": "one"}', "", '{"text": "two"}', ""],
        "a.json": ["[", '{"text": "one"},', '{"text":', '"two"}', "]"],
        "a.csv": ["text", "one", "two", ""],
        "a.txt": ["one", "two", ""],
    }[name]
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())
    found = [
        (one.text, one.line) for one in load_examples([SourceSection(path=str(path))], on_bad_row="error", seed=0)[0]
    ]
    places = {"a.jsonl": (1, 3), "a.json": (2, 3), "a.csv": (2, 3)}
    want = [("one\ntwo\n", 1)] if name == "a.txt" else list(zip(("one", "two"), places[name], strict=True))
    assert found == want
    path.write_bytes(path.read_bytes().replace(b"two", b"\xe4"))
    bad = {"a.jsonl": 3, "a.json": 4, "a.csv": 3, "a.txt": 2}[name]
    assert f"{name}:{bad}: not UTF-8 text (byte 0xe4" in said(path, path.read_bytes())


NESTED = 'the row is a list, not an object (a row is written like this: {"prompt": "...", "completion": "..."})'


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_nested_arrays_show_the_right_form(tmp_path: Path, name: str) -> None:
    assert said(tmp_path / name, '[["SECRET", "SECRET"]]').startswith(f"{name}:1: {NESTED}")
    lines = said(tmp_path / name, '[\n["SECRET", "b"],\n["c", "d"]\n]').splitlines()
    assert lines[0] == "2 of 2 rows cannot be used:"
    assert lines[1] == f"{name}:2: {NESTED} [2 rows like this]"
    assert said(tmp_path / name, "[]").startswith(f"{name}: the array is empty. A row is written like this: [{{")


ARRAYS = {
    "trailing comma": (f"[\n{GOOD},\n]", "a.json:2: not valid JSON (column 45: a comma before the closing bracket)"),
    "cut short": (f"[\n{GOOD},\n" + '{"prompt": "SEC', "a.json:3: not valid JSON (column 12: a text that starts here"),
    "not closed": (f"[\n{GOOD}\n", "a.json:3: not valid JSON (column 1: it ends in the middle of a value)"),
    "no comma": (f"[\n{GOOD}\n{GOOD}]", "a.json:3: not valid JSON (column 1: expecting ',' between two rows"),
    "inside a row": (f'[\n{GOOD},\n{{"prompt":\n"SECRET",}}]', "a.json:4: not valid JSON (column 9: a comma before"),
    "text behind": (f"[\n{GOOD}\n]\nSECRET", "a.json:4: not valid JSON (column 1: more text after the value)"),
    "not JSON": ("SECRET\n", "a.json:1: not valid JSON (column 1: expecting value)"),
    "single quotes": ("{'prompt': 'SECRET',\n 'completion': ''}", "a.json:1: not valid JSON (column 2: single quotes;"),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("policy", ["error", "drop"])
def test_a_broken_array_stops_at_its_line(tmp_path: Path, name: str, policy: str) -> None:
    text, expected = ARRAYS[name]
    assert said(tmp_path / "a.json", text, policy).startswith(expected)


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_truncated_gzip_stops_whatever_the_policy(tmp_path: Path, policy: str) -> None:
    rows = "".join(f'{{"prompt": "{number}", "completion": "{number * 7919}"}}\n' for number in range(5000))
    data = gzip.compress(rows.encode())
    message = said(tmp_path / "a.jsonl.gz", data[: len(data) // 2], policy)
    assert "a.jsonl.gz:" in message
    assert "the .gz file is cut short; copy it again" in message
    assert "is damaged" in said(tmp_path / "b.jsonl.gz", data[:10] + b"\xff" * 40, policy)
    plain = said(tmp_path / "c.jsonl.gz", GOOD.encode(), policy)
    assert plain == "c.jsonl.gz: its name ends in .gz and it is not compressed. Take .gz from its name, or compress it."


def test_bad_lines_are_dropped_when_asked_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{GOOD}\n[]\n{{"prompt": \n{GOOD}\n', encoding="utf-8")
    examples, report = load_examples([SourceSection(path=str(path))], on_bad_row="drop", seed=0)
    assert [example.line for example in examples] == [1, 4]
    assert [(drop.reason, drop.rows, drop.first) for drop in report.drops] == [
        ("the row is a list, not an object", 1, f"{path}:2"),
        ("not valid JSON", 1, f"{path}:3"),
    ]


def test_a_broken_first_line_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": \n{GOOD}\n{GOOD}\n', encoding="utf-8")
    assert count(path, "drop") == 2
    assert said(path, path.read_bytes()).startswith("a.jsonl:1: not valid JSON (column 12: it ends in the middle")
