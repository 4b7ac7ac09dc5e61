"""Files into raw rows: every supported kind, the place of each row, and what a broken file says."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants as constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frugal.config import SourceSection
from frugal.data.report import DataReport
from frugal.data.rows import BadRow, RawRow
from frugal.data.sources import read
from frugal.errors import DataError

ROWS = [{"prompt": "one", "completion": "1"}, {"prompt": "zwei → 二 😀", "completion": "2"}]


def rows_of(path: Path | str, **source: object) -> tuple[list[dict], list[int], DataReport]:
    report = DataReport()
    rows = list(read.read_rows(SourceSection(path=str(path), **source), report))
    assert all(isinstance(row, RawRow) for row in rows), rows
    return [row.value for row in rows], [row.line for row in rows], report


def faults_of(path: Path | str) -> list[str]:
    rows = read.read_rows(SourceSection(path=str(path)), DataReport())
    return [f"{row.line}: {row.fault}" for row in rows if isinstance(row, BadRow)]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


FORMS = {
    "a.jsonl": jsonl(ROWS),
    "no newline at end.jsonl": jsonl(ROWS).rstrip("\n"),
    "a.ndjson": jsonl(ROWS),
    "lines.json": jsonl(ROWS),
    "crlf.jsonl": jsonl(ROWS).replace("\n", "\r\n"),
    "bom.jsonl": "\ufeff" + jsonl(ROWS),
    "array.json": json.dumps(ROWS),
    "array.jsonl": json.dumps(ROWS, indent=1),
    "bom.json": "\ufeff" + json.dumps(ROWS, ensure_ascii=False, indent=2),
    "wrapped.json": json.dumps({"data": ROWS}, indent=2),
    "wrapped one row a line.json": '{"data": [\n' + ",\n".join(map(json.dumps, ROWS)) + "\n]}\n",
    "wrapped in one line.json": json.dumps({"data": ROWS}),
    "a.csv": "prompt,completion\none,1\nzwei → 二 😀,2\n",
    "quoted.csv": '\ufeffprompt,completion\r\n"one","1"\r\n\r\n"zwei → 二 😀",2',
    "a.tsv": "prompt\tcompletion\none\t1\nzwei → 二 😀\t2\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "mit Leerzeichen und ü"
    assert rows_of(write(folder, name, FORMS[name]))[0] == ROWS


@pytest.mark.parametrize("name", FORMS)
def test_each_form_can_be_gzipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(FORMS[name].encode("utf-8")))
    assert rows_of(path)[0] == ROWS


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, "a.jsonl", '\n{"a": 1}\n\n  \n{"a": 2}\n'))[1] == [2, 5]
    assert rows_of(write(tmp_path, "a.json", '\n[\n {"a":\n 1},\n\n {"a": 2}, {"a": 3}\n]'))[1] == [3, 6, 6]
    assert rows_of(write(tmp_path, "b.json", json.dumps({"data": [{"a": 1}, {"a": 2}]}, indent=1)))[1] == [3, 6]
    assert rows_of(write(tmp_path, "a.csv", 'a,b\n"x\ny",1\n\nz,2\n'))[1] == [2, 5]


def test_key_order_is_the_files(tmp_path: Path) -> None:
    row = '{"z": {"b": 1, "a": {"d": null, "c": 2}}, "a": 1}'
    for name, text in (("a.jsonl", row), ("a.json", f"[{row}]")):
        assert json.dumps(rows_of(write(tmp_path, name, text))[0][0]) == row


def test_csv_keeps_text_as_it_is(tmp_path: Path) -> None:
    inside = write(tmp_path, "q.csv", 'a,b\n5" pipe,x "y" z\n')
    assert rows_of(inside)[0] == [{"a": '5" pipe', "b": 'x "y" z'}]
    path = write(tmp_path, "a.csv", 'a,b\n" x, ""y"" \n z",\n007,NA\n')
    assert rows_of(path)[0] == [{"a": ' x, "y" \n z', "b": ""}, {"a": "007", "b": "NA"}]
    long = "x" * 8_000_000
    assert rows_of(write(tmp_path, "b.csv", f'a,b\n"{long}",1\n'))[0] == [{"a": long, "b": "1"}]


def test_a_csv_of_names_alone_has_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no rows, only the line that names the columns \(prompt, completion\)"):
        rows_of(write(tmp_path, "a.csv", "prompt,completion\n\n"))


def test_csv_leaves_the_limit_of_fields_as_it_was(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    for text in ("a,b\n1,2\n", 'a,b\n1,"2\n', f'a\n"{"x" * (limit + 1)}"\n'):
        list(read.read_rows(SourceSection(path=str(write(tmp_path, "a.csv", text))), DataReport()))
        assert csv.field_size_limit() == limit


def test_csv_faults(tmp_path: Path) -> None:
    assert faults_of(write(tmp_path, "a.csv", "a,b\n1,2\n1,2,3\n4,5\n")) == [
        "3: another number of fields than the header (3 instead of 2; a text with ',' or a line break needs quotes)"
    ]
    assert faults_of(write(tmp_path, "b.csv", 'a,b\n1,"2\n3,4\n'))[0].startswith("2: a quoted field is not closed")
    assert faults_of(write(tmp_path, "c.csv", 'a,b\n1,"x"y\n'))[0].startswith(
        "2: a quoted field is not closed, or text"
    )
    for text, said in (
        ("a;b\n1;2\n", "separated by semicolons"),
        ("a,a\n1,2\n", "'a' is there twice"),
        (",\n1,2\n", "no column has a name"),
        ("", "is empty"),
    ):
        with pytest.raises(DataError, match=said):
            rows_of(write(tmp_path, "d.csv", text))
    (tmp_path / "e.csv").write_bytes(b"a,b\nx,y\nx,\xff\n")
    with pytest.raises(DataError, match=r"e\.csv:3: not UTF-8 text \(byte 0xff, byte 3 of the line, offset"):
        rows_of(tmp_path / "e.csv")


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "\ufeffone\r\n\r\ntwo\n")
    assert rows_of(path) == ([{"text": "one\n\ntwo\n"}], [1], DataReport())
    (tmp_path / "b.md").write_bytes(b"good\nb\xc3\xa4d \xe4\n")
    (fault,) = faults_of(tmp_path / "b.md")
    assert fault.startswith("2: not UTF-8 text (byte 0xe4, byte 6 of the line, offset ")


def test_parquet_pads_nothing(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "x"}], "calls": [{"f": {"a": 1}}]},
        {"messages": [{"role": "user", "content": "y", "weight": 0}], "calls": [{"f": {"b": "x"}}], "only": 1},
        {"messages": [], "calls": [{"f": {}}]},
    ]
    table = pa.Table.from_pylist(
        rows,
        schema=pa.schema(
            [
                (
                    "messages",
                    pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("weight", pa.int64())])),
                ),
                ("calls", pa.list_(pa.struct([("f", pa.struct([("a", pa.int64()), ("b", pa.string())]))]))),
                ("only", pa.int64()),
            ]
        ),
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    values, lines, _ = rows_of(tmp_path / "a.parquet")
    assert values == rows
    assert lines == [1, 2, 3]


def test_json_columns_keep_their_nulls(tmp_path: Path) -> None:
    array = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"b": null, "a": 1}', "{}"]))
    pq.write_table(pa.table({"arguments": array}), tmp_path / "a.parquet")
    assert json.dumps(rows_of(tmp_path / "a.parquet")[0]) == '[{"arguments": {"b": null, "a": 1}}, {"arguments": {}}]'


def test_broken_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        rows_of(tmp_path / "a.parquet")


def test_folder_in_sorted_order(tmp_path: Path) -> None:
    write(tmp_path, "b.jsonl", jsonl(ROWS[1:]))
    write(tmp_path, "a/z.json", json.dumps(ROWS[:1]))
    write(tmp_path, "README.md", "about")
    write(tmp_path, ".hidden/x.jsonl", "{")
    values, _, report = rows_of(tmp_path)
    assert values == ROWS
    assert report.notes == [f"{tmp_path}: text files beside tables or JSON are left out: README.md"]
    names = [row.file for row in read.read_rows(SourceSection(path=f"{tmp_path}/"), DataReport())]
    assert names == [f"{tmp_path}/a/z.json", f"{tmp_path}/b.jsonl"]


def test_folder_never_mixes_splits(tmp_path: Path) -> None:
    write(tmp_path, "data/train-00000-of-00001.jsonl", jsonl(ROWS[:1]))
    write(tmp_path, "data/test-00000-of-00001.jsonl", jsonl(ROWS[1:]))
    values, _, report = rows_of(tmp_path)
    assert values == ROWS[:1]
    assert "left out: data/test-00000-of-00001.jsonl" in report.notes[0]
    assert rows_of(tmp_path, split="test")[0] == ROWS[1:]
    with pytest.raises(DataError, match=r"no file of split 'validation'. Splits by file name: test, train"):
        rows_of(tmp_path, split="validation")


def test_folder_of_the_datasets_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "two")
    assert rows_of(tmp_path / "one")[:2] == (ROWS, [1, 2])
    assert rows_of(tmp_path / "two")[0] == ROWS
    assert rows_of(tmp_path / "two", split="test")[0] == ROWS[1:]
    with pytest.raises(DataError, match=r"no split 'dev'. Splits: test, train"):
        rows_of(tmp_path / "two", split="dev")


def test_python_in_a_data_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    marker = tmp_path / "marker"
    script = f"open({str(marker)!r}, 'w').write('ran')\n"
    for name in ("corpus.py", "__init__.py", "dataset.py"):
        write(folder, name, script)
    with pytest.raises(DataError, match="holds no data file"):
        rows_of(folder)
    write(folder, "a.jsonl", jsonl(ROWS))
    assert rows_of(folder)[0] == ROWS
    assert not marker.exists()


def test_catalogue_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "english.jsonl", jsonl(ROWS))
    write(tmp_path, "german.jsonl", jsonl(ROWS[1:]))
    write(tmp_path, "source.json", "{}")
    monkeypatch.setattr(read, "fetch", lambda name: tmp_path)
    assert rows_of("chatterbot-corpus")[0] == ROWS
    assert rows_of("chatterbot-corpus", name="german")[0] == ROWS[1:]
    with pytest.raises(DataError, match="is one of: english, german"):
        rows_of("chatterbot-corpus", name="klingon")
    with pytest.raises(DataError, match="a model, not a data set"):
        rows_of("smollm2-135m-instruct")


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "train.jsonl", jsonl(ROWS))
    with pytest.raises(DataError, match=r"there is no such file or folder\. Near it: train\.jsonl\."):
        rows_of(tmp_path / "trian.jsonl")
    for no_path in ("x" * 5000, "~nobody-here/a.jsonl"):
        with pytest.raises(DataError, match="cannot be a path"):
            rows_of(no_path)
    with pytest.raises(DataError, match="addresses are not read"):
        rows_of("https://example.org/a.jsonl")
    with pytest.raises(DataError, match=r"files of this kind cannot be read. Supported: \.json"):
        rows_of(write(tmp_path, "a.xlsx", "x"))
    with pytest.raises(DataError, match="`split` and `name` belong to"):
        rows_of(tmp_path / "train.jsonl", split="train")


READ_AND_PRINT = """
import json, sys
from frugal.config import SourceSection
from frugal.data.sources.mixing import load_examples
assert sys.getfilesystemencoding() == "ascii"
for path in json.loads(sys.argv[1]):
    examples, _ = load_examples([SourceSection(path=path)], on_bad_row="error", seed=0)
    print(json.dumps([[example.source, example.prompt] for example in examples]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are UTF-8 in any locale")
def test_any_locale_reads_utf8(tmp_path: Path) -> None:
    lines = write(tmp_path, "mit Leerzeichen und 二/ü →.jsonl", jsonl(ROWS))
    table = tmp_path / "ü.parquet"
    with table.open("wb") as handle:
        pq.write_table(pa.Table.from_pylist(ROWS), handle)
    paths = json.dumps([str(lines.parent), str(lines), str(table)])
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", READ_AND_PRINT, paths]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    expected = [[[str(path), row["prompt"]] for row in ROWS] for path in (lines, lines, table)]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


def test_hub_id_that_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"nobody/nothing-here: no such file or folder here, and the hub "):
        rows_of("nobody/nothing-here")


def test_a_mistyped_path_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"data/trian.*data/train|data/trian.*train"):
        list(read.read_rows(SourceSection(path="data/trian"), DataReport()))
