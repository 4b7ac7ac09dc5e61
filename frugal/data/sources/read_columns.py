"""Columnar sources (Parquet, `datasets` folders and hub ids) into rows of plain Python values.

A columnar store gives every struct of a column the union of all keys and fills the rest with null, so `f(a=1)` comes
back as `f(a=1, b=null)`. What was null in the file and what is padding cannot be told apart; therefore a null inside a
struct, and a null column, is read as absent. Arguments with a genuine null belong in JSON files, in a JSON column, or
in a text column that holds JSON.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from frugal.data.rows import BadRow, RawRow, RowError
from frugal.data.sources.strict_json import loads
from frugal.errors import DataError
from frugal.hub import reachable

_BATCH_ROWS = 1024
_BATCH_ROWS_OF_BYTES = 16
Convert = Callable[[Any], Any]


def read_parquet(path: Path, file: str) -> Iterator[RawRow | BadRow]:
    """Rows of one Parquet file; the line is the row's number, from 1.

    Raises:
        DataError: not a Parquet file, cut short, or without rows.
    """
    try:
        # Opened here, because Arrow takes no path with a name that the locale cannot spell.
        with path.open("rb") as handle:
            opened = pq.ParquetFile(handle)
            if opened.metadata.num_rows == 0:
                raise DataError(f"{file}: the file has no rows.")
            leaves, has_bytes = _leaves(opened.schema)
            batch_rows = _BATCH_ROWS if not has_bytes else _BATCH_ROWS_OF_BYTES
            yield from rows_of(opened.iter_batches(batch_size=batch_rows, columns=leaves), file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as Parquet: {_first_line(error)}") from error


def _leaves(schema: pq.ParquetSchema) -> tuple[list[str], bool]:
    """(leaf columns to read, whether one of them holds bytes).

    Bytes of pictures and sounds beside other fields (`images: list<struct<bytes, path>>`) are not read: no format uses
    them, and that the value is there is seen from its other fields. Bytes that are a column of their own are read, a
    few rows at a time.
    """
    columns = [schema.column(index) for index in range(len(schema))]
    holds_bytes = [one.physical_type == "BYTE_ARRAY" and str(one.logical_type.type) == "NONE" for one in columns]
    siblings: dict[str, int] = {}
    for one, raw in zip(columns, holds_bytes, strict=True):
        parent = one.path.rpartition(".")[0]
        siblings[parent] = siblings.get(parent, 0) + (not raw)
    leaves = [
        one.path
        for one, raw in zip(columns, holds_bytes, strict=True)
        if not (raw and "." in one.path and siblings[one.path.rpartition(".")[0]])
    ]
    return leaves, any(raw and one.path in leaves for one, raw in zip(columns, holds_bytes, strict=True))


def rows_of(batches: Iterable[pa.RecordBatch | pa.Table], file: str) -> Iterator[RawRow | BadRow]:
    """Rows of arrow batches: null columns and nulls in structs are left out, JSON columns are decoded."""
    line = 0
    for batch in batches:
        converters = [
            (name, _converter(kind)) for name, kind in zip(batch.schema.names, batch.schema.types, strict=True)
        ]
        columns = [column.to_pylist() for column in batch.columns]
        for values in zip(*columns, strict=True):
            line += 1
            row: dict[str, Any] = {}
            try:
                for (name, convert), value in zip(converters, values, strict=True):
                    if value is not None:
                        row[name] = value if convert is None else convert(value)
            except RowError as fault:
                yield BadRow(fault, file, line)
                continue
            yield RawRow(row, file, line)


def _converter(kind: pa.DataType) -> Convert | None:
    """How values of an arrow type become plain ones; None when they are already."""
    if isinstance(kind, pa.JsonType):
        return loads
    if isinstance(kind, pa.DictionaryType):
        return _converter(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type)
    if isinstance(kind, pa.StructType):
        return _struct(
            [(kind.field(index).name, _converter(kind.field(index).type)) for index in range(kind.num_fields)]
        )
    if isinstance(kind, pa.MapType):
        return _map(_converter(kind.item_type))
    if isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        return _list(_converter(kind.value_type))
    return None


def _struct(fields: list[tuple[str, Convert | None]]) -> Convert:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value[name] if inner is None else inner(value[name])
            for name, inner in fields
            if value[name] is not None
        }

    return convert


def _list(inner: Convert | None) -> Convert | None:
    if inner is None:
        return None
    return lambda values: [None if value is None else inner(value) for value in values]


def _map(inner: Convert | None) -> Convert:
    return lambda pairs: {key: value if inner is None or value is None else inner(value) for key, value in pairs}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def read_hub(path: str, name: str | None, split: str | None) -> Iterator[RawRow | BadRow]:
    """Rows of a hub data set's split (`train` when none is given); the line is the row's number, from 1.

    Raises:
        DataError: not found, no network, or an unknown configuration or split.
    """
    datasets = importlib.import_module("datasets")
    kept = Path(datasets.config.HF_DATASETS_CACHE) / path.replace("/", "___")
    if not kept.is_dir() and not reachable():
        raise DataError(
            f"{path}: no such file or folder here, and the hub cannot be reached to look for a data set of this name. "
            "Correct the path, or download the data set where there is a network and give its folder."
        )
    try:
        loaded = datasets.load_dataset(path, name=name, split=split or "train")
    # The library and what it calls raise dozens of classes for "not there" and "no network"; all are the user's to fix.
    except Exception as error:
        raise DataError(
            f"{path}: no such file or folder here, and the hub data set could not be loaded "
            f"({type(error).__name__}: {_first_line(error)}). Check the spelling, `name`, `split` and the network, "
            "or download it and give the folder's path."
        ) from error
    yield from _dataset_rows(loaded, path)


def read_saved(folder: Path, split: str | None, shown: str) -> Iterator[RawRow | BadRow]:
    """Rows of a folder that `datasets` wrote with `save_to_disk`.

    Raises:
        DataError: damaged, or without the split.
    """
    datasets = importlib.import_module("datasets")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{shown}: `datasets` cannot load the folder: {_first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        wanted = split or "train"
        if wanted not in loaded:
            raise DataError(f"{shown}: there is no split {wanted!r}. Splits: {', '.join(sorted(loaded))}.")
        loaded = loaded[wanted]
    elif split is not None:
        raise DataError(f"{shown}: the folder has no splits. Remove `split`.")
    yield from _dataset_rows(loaded, shown)


def _dataset_rows(loaded: Any, shown: str) -> Iterator[RawRow | BadRow]:
    """Rows as arrow has them: images and sounds are not decoded, only what a format uses is looked at."""
    if len(loaded) == 0:
        raise DataError(f"{shown}: the data set has no rows.")
    yield from rows_of(loaded.with_format("arrow").iter(batch_size=_BATCH_ROWS), shown)
