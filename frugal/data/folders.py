"""Which files of a data folder are read: supported ones, sorted, of one split; test rows never become training rows."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from frugal.errors import DataError

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


def shown_name(path: PurePath) -> str:
    """A path that the file system gave as text that can be printed: UTF-8 even where the locale is not."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


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
