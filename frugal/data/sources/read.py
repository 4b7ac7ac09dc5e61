"""Sources into raw rows with the place each came from.

A source is a file (`.json`, `.jsonl`, `.ndjson`, `.csv`, `.tsv`, `.parquet`, `.txt`, `.md`, each also with `.gz`), a
folder of such files, a folder written by `datasets`, a data set that `frugal fetch` knows, or a `datasets` hub id. A
text file is one document. No Python from a data folder is ever run.
"""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import BinaryIO, cast

from frugal.assets import CATALOGUE, DEFAULT_DATA_FILE, fetch, is_known
from frugal.config import SourceSection
from frugal.data.report import DataReport
from frugal.data.rows import BadRow, RawRow, RowError
from frugal.data.sources.encoding import decode, refuse_utf16
from frugal.data.sources.find import SUFFIXES, find, shown_name, suffix_of
from frugal.data.sources.read_columns import read_hub, read_parquet, read_saved
from frugal.data.sources.read_csv import read_csv
from frugal.data.sources.read_json import read_json
from frugal.errors import DataError


def read_rows(source: SourceSection, report: DataReport) -> Iterator[RawRow | BadRow]:
    """Rows of a source, in order; files of a folder in sorted order. Notes about files left out go to ``report``.

    Raises:
        DataError: the source does not exist, is of an unknown kind, or a file cannot be read at all.
    """
    path = source.path
    local = find(source)
    if local is None and is_known(path):
        file = _catalogue_file(source)
        yield from read_file(file, f"{path}/{file.name}")
    elif local is None:
        yield from read_hub(path, source.name, source.split)
    elif local.is_dir() and is_datasets_folder(local):
        yield from read_saved(local, source.split, path)
    elif local.is_dir():
        files, left_out = choose_files(local, SUFFIXES, source.split, path)
        for note in left_out:
            report.note(note)
        for file in files:
            yield from read_file(file, f"{path.rstrip('/')}/{shown_name(file.relative_to(local))}")
    else:
        yield from read_file(local, path)


def read_file(path: Path, file: str) -> Iterator[RawRow | BadRow]:
    """Rows of one file; ``file`` is its name in messages.

    Raises:
        DataError: unknown kind, empty, unreadable, or not in its own format from the first byte.
    """
    suffix = suffix_of(path)
    if suffix is None:
        raise DataError(f"{file}: files of this kind cannot be read. Supported: {', '.join(SUFFIXES)}, each also .gz.")
    zipped = path.name.lower().endswith(".gz")
    if suffix == ".parquet":
        if zipped:
            raise DataError(f"{file}: Parquet is compressed inside already; unpack the .gz.")
        yield from read_parquet(path, file)
        return
    last_line = 0
    try:
        with path.open("rb") as plain:
            handle = cast(BinaryIO, gzip.GzipFile(fileobj=plain)) if zipped else plain
            for row in _rows_of_text(handle, file, suffix):
                last_line = row.line
                yield row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if not _begins_as_gzip(path):
            raise DataError(
                f"{file}: its name ends in .gz and it is not compressed. Take .gz from its name, or compress it."
            ) from error
        reason = "the .gz file is cut short" if isinstance(error, EOFError) else "the .gz file is damaged"
        yield BadRow(RowError(f"{reason}; copy it again"), file, last_line + 1, fatal=True)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _begins_as_gzip(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(2) == b"\x1f\x8b"


def _rows_of_text(handle: BinaryIO, file: str, suffix: str) -> Iterator[RawRow | BadRow]:
    if suffix in (".json", ".jsonl", ".ndjson"):
        yield from read_json(handle, file)
    elif suffix in (".csv", ".tsv"):
        yield from read_csv(handle, file, "," if suffix == ".csv" else "\t")
    else:
        yield from _document(handle, file)


def _document(handle: BinaryIO, file: str) -> Iterator[RawRow | BadRow]:
    """A text file as one row `{"text": ...}`, line breaks as \\n."""
    data = handle.read().removeprefix(b"\xef\xbb\xbf")
    refuse_utf16(data, file)
    if not data.strip():
        raise DataError(f"{file}: the file is empty.")
    lines: list[str] = []
    offset = 0
    pieces = re.split(rb"(\r\n|\r|\n)", data)
    for number, (line, end) in enumerate(itertools.zip_longest(pieces[::2], pieces[1::2], fillvalue=b""), start=1):
        try:
            lines.append(decode(line, file, offset))
            offset += len(line) + len(end)
        except RowError as fault:
            yield BadRow(fault, file, number, fatal=True)
            return
    yield RawRow({"text": "\n".join(lines)}, file, 1)


def _catalogue_file(source: SourceSection) -> Path:
    """The file of a data set from `frugal fetch`: the one called ``source.name``, or its usual one."""
    entry = CATALOGUE[source.path]
    if entry.kind != "data":
        raise DataError(f"{source.path}: this is a model, not a data set.")
    folder = fetch(source.path)
    file = folder / (DEFAULT_DATA_FILE if source.name is None else f"{PurePath(source.name).name}.jsonl")
    if not file.is_file():
        names = ", ".join(sorted(path.stem for path in folder.glob("*.jsonl")))
        raise DataError(f"{source.path}: there is no part {source.name!r}. `name` is one of: {names}.")
    return file


_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "evaluation": "validation",
}
_PROSE = (".txt", ".md")
_BESIDE = ("source.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def is_datasets_folder(folder: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def choose_files(
    folder: Path, suffixes: tuple[str, ...], split: str | None, shown: str
) -> tuple[list[Path], list[str]]:
    """Files to read, sorted by their path inside the folder, and notes about those left out.

    A split's name in a file's or subfolder's name (`train-00000.parquet`, `test/a.jsonl`) puts it into that split. With
    ``split`` unset, `train` files are read when there are any, else every file. Text files beside tables or JSON (a
    README) are left out, so are hidden files and the description files of `datasets`.

    Raises:
        DataError: no supported file, or none of the split.
    """
    inside = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    inside = [path for path in inside if not any(part.startswith((".", "_")) for part in path.parts)]
    supported = sorted((path for path in inside if _has_suffix(path, suffixes)), key=lambda path: path.as_posix())
    supported = [path for path in supported if path.name not in _BESIDE]
    notes: list[str] = []
    tables = [path for path in supported if not _has_suffix(path, _PROSE)]
    if tables and len(tables) < len(supported):
        prose = [shown_name(path) for path in supported if path not in tables]
        notes.append(f"{shown}: text files beside tables or JSON are left out: {_some(prose)}")
        supported = tables
    if not supported:
        raise DataError(f"{shown}: the folder holds no data file. Supported: {', '.join(suffixes)}, each also .gz.")
    by_split: dict[str | None, list[Path]] = {}
    for path in supported:
        by_split.setdefault(_split_of(path), []).append(path)
    if split is not None:
        chosen = by_split.get(_SPLIT_WORDS.get(split.lower(), split), [])
        if not chosen:
            found = ", ".join(sorted(name for name in by_split if name)) or "none"
            raise DataError(f"{shown}: no file of split {split!r}. Splits by file name: {found}.")
    else:
        chosen = by_split.get("train", supported)
        if len(chosen) < len(supported):
            others = [shown_name(path) for path in supported if path not in chosen]
            notes.append(f"{shown}: only files of split train are read, left out: {_some(others)}")
    return [folder / path for path in chosen], notes


def _has_suffix(path: PurePath, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(suffixes)


def _split_of(path: PurePath) -> str | None:
    """The split that a path names, the innermost part first."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
