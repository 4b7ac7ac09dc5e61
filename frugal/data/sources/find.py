"""Where a source of rows is: a local file or folder, a data set that `frugal fetch` knows, or a hub id. Reads no rows
and imports nothing heavy, so that a wrong path is told at once."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path, PurePath

from frugal.assets import CATALOGUE, is_known
from frugal.config import SourceSection
from frugal.errors import DataError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".md")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find(source: SourceSection) -> Path | None:
    """The file or folder of a source; None for a data set of `frugal fetch` and for a hub id, which are elsewhere.

    What is here is looked for first: `rows` beside `rows.jsonl` is a mistyped file, not a hub id.

    Raises:
        DataError: neither there nor a name that could be elsewhere; the message names what is near it.
    """
    path = source.path
    local = _local(path)
    if local.exists():
        if local.is_file() and (source.split is not None or source.name is not None):
            raise DataError(f"{path}: `split` and `name` belong to hub ids and folders; this is one file. Remove them.")
        return local
    if is_known(path):
        return None
    in_folder_here = "/" in path and Path(path).parent.is_dir()  # `data/trian` beside a folder `data`
    if is_hub_id(path) and suffix_of(local) is None and not in_folder_here and not _same_stem(local):
        return None
    raise DataError(_missing(path, local))


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(text) is not None


def suffix_of(path: PurePath) -> str | None:
    """The supported suffix of a file name (`.jsonl` for `a.jsonl.gz`), or None."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def shown_name(path: PurePath) -> str:
    """A path that the file system gave as text that can be printed: UTF-8 even where the locale is not."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


def _local(path: str) -> Path:
    """The path, with `~` resolved; refuses what no file system can hold. Names on disk are UTF-8 in any locale."""
    try:
        os.fsencode(path)
        native = path
    except UnicodeEncodeError:  # LC_ALL=C: Python would write the name in ASCII
        native = os.fsdecode(path.encode("utf-8", "surrogateescape"))
    try:
        local = Path(native).expanduser()
        local.exists()
    except (OSError, RuntimeError, ValueError) as error:
        shown = path if len(path) < 80 else f"{path[:77]}..."
        raise DataError(f"data path {shown!r} cannot be a path: {error.__class__.__name__}. Give a file.") from error
    return local


def _same_stem(local: Path) -> list[str]:
    """Data files here that are called so but for their suffix."""
    if not local.parent.is_dir():
        return []
    wanted = local.name.lower()
    return sorted(
        shown_name(PurePath(entry.name))
        for entry in local.parent.iterdir()
        if (suffix := suffix_of(entry)) and entry.name.lower().removesuffix(".gz") == wanted + suffix
    )


def _missing(path: str, local: Path) -> str:
    if "://" in path:
        return f"{path}: addresses are not read. Download the file and give its path, or give a `datasets` hub id."
    same = _same_stem(local)
    if same:
        return f"{path}: there is no such file or folder. Did you mean {same[0]}? A name of a file has its suffix."
    near: list[str] = []
    if local.parent.is_dir():
        names = sorted(shown_name(PurePath(entry.name)) for entry in local.parent.iterdir())
        near = difflib.get_close_matches(shown_name(PurePath(local.name)), names, n=3)
    hint = f" Near it: {', '.join(near)}." if near else ""
    known = ", ".join(sorted(name for name, entry in CATALOGUE.items() if entry.kind == "data"))
    return f"{path}: there is no such file or folder.{hint} `frugal fetch` knows the data sets: {known}."
