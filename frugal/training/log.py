"""`train_log.jsonl`: one JSON object a step, floats in full precision, flushed line by line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from frugal.errors import CheckpointError
from frugal.files import write_text


class TrainLog:
    """Appends records to a JSON-lines file.

    A disk that is full must not end a training run, nor leave half a line: lines that cannot be written are kept and
    tried again with the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._pending: list[str] = []
        self.problem: str | None = None
        """What the last write met, None when all lines are on disk."""

    def restart(self, step: int) -> None:
        """Drop the records after ``step``, and a broken last line: a resumed run writes them again."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the half line of a killed process
            if isinstance(record, dict) and record.get("step", step + 1) <= step:
                kept.append(line)
        try:
            write_text(self.path, "".join(line + "\n" for line in kept))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. NaN and infinities are written as null: JSON has no words for them."""
        self._pending.append(json.dumps(_jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")
        payload = "".join(self._pending).encode("utf-8")
        try:
            with open(self.path, "ab", buffering=0) as handle:
                size = handle.seek(0, os.SEEK_END)
                try:
                    if handle.write(payload) != len(payload):
                        raise OSError("the disk took only a part of the line")
                except OSError:
                    handle.truncate(size)
                    raise
        except OSError as error:
            self.problem = f"cannot write {self.path}: {error.strerror or error}"
            return
        self._pending.clear()
        self.problem = None


def read_log(path: Path) -> list[dict[str, Any]]:
    """All complete records of a log."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return value
