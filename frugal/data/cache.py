"""Tokenised data in the user's cache folder, keyed by content: what the tokens depend on is in the key, nothing else
is.

In the key: every example's content, the tokenizer's whole state, the template's text, the settings that change
tokens, and the source of frugal's own data code. Not in it: paths, names of files, learning rate, output folder. An
entry is built beside and renamed, with `meta.json` written last; a folder without it is never read. A file lock lets
a second process wait for the first one's work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from filelock import FileLock

from frugal.config import DataSection
from frugal.data.dataset import DatasetCounts, TokenDataset
from frugal.data.encode import RowEncoder
from frugal.data.rows import Example
from frugal.errors import ModelError
from frugal.files import fsync_file, fsync_folder, read_json, write_json
from frugal.tensor_files import map_arrays, write_tensors

_ARRAYS = ("input_ids", "trained", "doc_starts", "row_docs", "origins", "good")
_UNUSED_DAYS = 60


def default_folder() -> Path:
    """Where tokenised data are kept: `data` in the user's cache folder of frugal."""
    return Path(platformdirs.user_cache_dir("frugal")) / "data"


def cache_key(examples: Sequence[Example], row_encoder: RowEncoder, data: DataSection) -> str:
    """SHA-256 over everything that the tokens depend on."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        digest.update(b"\0")

    add([_code_digest(), version("tokenizers"), version("jinja2")])
    add(asdict(row_encoder.encoder.state))
    renderer = row_encoder.renderer
    add(renderer.template.source if renderer is not None else None)
    add(renderer.dated if renderer is not None else [])  # another day, other rows, where the template prints the date
    add([row_encoder.train_on, row_encoder.system_prompt, data.max_length, data.on_overflow, data.packing])
    for example in examples:
        digest.update(example.content())
        digest.update(b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """Digest of frugal's data code: a change of it never reads tokens that older code made."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Hold the lock of one entry. Raises OSError when the cache folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{key}.lock"):
        yield


def load(folder: Path, key: str) -> tuple[TokenDataset, DatasetCounts] | None:
    """The entry mapped from its file, or None when there is no complete one."""
    entry = folder / key
    tokens, meta = entry / "tokens.safetensors", entry / "meta.json"
    try:
        stored = read_json(meta)
        if stored["key"] != key or tokens.stat().st_size != stored["bytes"]:
            return None
        arrays = map_arrays(tokens)
        with contextlib.suppress(OSError):  # another user's cache may be read-only
            os.utime(meta)  # says that the entry is in use, see `_tidy`
        return TokenDataset(**{name: arrays[name] for name in _ARRAYS}), DatasetCounts.from_json(stored["count"])
    except (OSError, ModelError, ValueError, KeyError, TypeError):
        return None  # incomplete or of another layout: it is made anew and replaced


def store(folder: Path, key: str, dataset: TokenDataset, count: DatasetCounts) -> None:
    """Write an entry: whole or absent. Raises OSError when there is no room or no right to write."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    beside.mkdir()
    try:
        tokens = beside / "tokens.safetensors"
        arrays = {name: torch.from_numpy(np.ascontiguousarray(getattr(dataset, name))) for name in _ARRAYS}
        write_tensors(tokens, arrays, allow_empty=True)
        fsync_file(tokens)
        write_json(beside / "meta.json", {"key": key, "bytes": tokens.stat().st_size, "count": count.to_json()})
        entry = folder / key
        if entry.exists():
            shutil.rmtree(entry)  # not complete, else it would have been read
        beside.rename(entry)
        fsync_folder(folder)
        _tidy(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove entries that no run has used for a while, and what killed processes left."""
    now = time.time()
    for path in folder.iterdir():
        days = _UNUSED_DAYS if not path.name.endswith(".tmp") else 1
        mark = path / "meta.json" if (path / "meta.json").exists() else path
        if path.is_dir() and now - mark.stat().st_mtime > days * 86400:
            shutil.rmtree(path, ignore_errors=True)
            if not path.name.startswith("."):
                (folder / f".{path.name}.lock").unlink(missing_ok=True)
