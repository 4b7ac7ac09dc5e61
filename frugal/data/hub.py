"""Data sets through the `datasets` library: hub ids and folders written by `save_to_disk`.

`datasets` is imported when such a source is read, because it takes seconds. HF_HUB_OFFLINE is honoured by the library.
Loading scripts are refused by `datasets` >= 4; nothing here turns remote code on.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frugal.data.faults import BadRow, RawRow
from frugal.data.read_columns import rows_of
from frugal.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_BATCH_ROWS = 1024


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(text) is not None


def read_hub(path: str, name: str | None, split: str | None) -> Iterator[RawRow | BadRow]:
    """Rows of a hub data set's split (`train` when none is given); the line is the row's number, from 1.

    Raises:
        DataError: not found, no network, or an unknown configuration or split.
    """
    datasets = importlib.import_module("datasets")
    try:
        loaded = datasets.load_dataset(path, name=name, split=split or "train")
    # The library and what it calls raise dozens of classes for "not there" and "no network"; all are the user's to fix.
    except Exception as error:
        raise DataError(
            f"{path}: no such file or folder here, and the hub data set could not be loaded "
            f"({type(error).__name__}: {_first_line(error)}). Check the spelling, `name`, `split` and the network, "
            "or download it and give the folder's path."
        ) from error
    yield from _rows(loaded, path)


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
    yield from _rows(loaded, shown)


def _rows(loaded: Any, shown: str) -> Iterator[RawRow | BadRow]:
    """Rows as arrow has them: images and sounds are not decoded, only what a format uses is looked at."""
    if len(loaded) == 0:
        raise DataError(f"{shown}: the data set has no rows.")
    yield from rows_of(loaded.with_format("arrow").iter(batch_size=_BATCH_ROWS), shown)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
