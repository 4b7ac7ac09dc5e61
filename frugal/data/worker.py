"""Tokenising in other processes: `python -m frugal.data.worker FOLDER` prepares the examples of FOLDER/job.json.

A plain subprocess, not multiprocessing: it never imports the user's main script again, so it works from scripts
without a main guard, from standard input, in notebooks and on Windows. What passes between the processes are UTF-8
JSON and safetensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from frugal.data.prepare import PreparedRow, RowPreparer
from frugal.data.render import ChatRenderer
from frugal.data.tokenize import EncoderState, TextEncoder
from frugal.data.types import Example, Message
from frugal.errors import DataError
from frugal.files import read_json, write_json

CHUNK = 256
"""Examples tokenised together."""


def prepare_all(
    preparer: RowPreparer, examples: Sequence[Example], num_proc: int, say: Callable[[str], None]
) -> list[PreparedRow]:
    """All rows, in order, with ``num_proc`` processes; in this one alone when others cannot be started (said once)."""
    if num_proc > 1 and len(examples) > 1:
        try:
            return _in_processes(preparer, examples, min(num_proc, len(examples)))
        except (OSError, subprocess.SubprocessError, _WorkerFailed) as fault:
            say(f"data.num_proc: {num_proc}: worker processes could not be used ({fault}); tokenising in one process.")
    rows: list[PreparedRow] = []
    for at in range(0, len(examples), CHUNK):
        rows += preparer.prepare(examples[at : at + CHUNK])
    return rows


class _WorkerFailed(Exception):
    """A worker ended without a result."""


def _in_processes(preparer: RowPreparer, examples: Sequence[Example], num_proc: int) -> list[PreparedRow]:
    if not sys.executable:
        raise _WorkerFailed("this Python does not know its own program")
    renderer = preparer.renderer
    job: dict[str, Any] = {
        "state": asdict(preparer.encoder.state),
        "template": None if renderer is None else [renderer.template.source, renderer.name],
        "train_on": preparer.train_on,
        "system_prompt": preparer.system_prompt,
    }
    environment = {**os.environ, "PYTHONPATH": _python_path()}
    with tempfile.TemporaryDirectory(prefix="frugal-tokens-") as folder:
        running: list[tuple[Path, subprocess.Popen[bytes]]] = []
        limits = np.linspace(0, len(examples), num_proc + 1).astype(int).tolist()
        try:
            for number in range(num_proc):
                place = Path(folder) / str(number)
                place.mkdir()
                part = [asdict(example) for example in examples[limits[number] : limits[number + 1]]]
                # Lone surrogates may come from JSON escapes; ASCII escapes carry them.
                (place / "job.json").write_text(json.dumps({**job, "examples": part}), encoding="ascii")
                command = [sys.executable, "-m", "frugal.data.worker", str(place)]
                with open(place / "log", "wb") as log:
                    # In its own folder: `-m` looks for modules in the working folder first.
                    process = subprocess.Popen(
                        command, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                running.append((place, process))
            return [row for place, process in running for row in _result(place, process)]
        finally:
            for _, process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _python_path() -> str:
    """Where the child finds this very package."""
    home = str(Path(__file__).resolve().parents[2])
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([home, given] if given else [home])


def _result(place: Path, process: subprocess.Popen[bytes]) -> list[PreparedRow]:
    code = process.wait()
    refused = place / "refused.json"
    if refused.exists():
        raise DataError(read_json(refused))
    if code != 0:
        log = (place / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise _WorkerFailed(log[-1] if log else f"exit code {code}")
    arrays, notes = load_file(place / "rows.safetensors"), read_json(place / "rows.json")
    limits = arrays["limits"]
    return [
        PreparedRow(
            ids=arrays["ids"][begin:end],
            trained=arrays["trained"][begin:end],
            **{**note, "ended": Counter(note["ended"]), "untrained_ends": Counter(note["untrained_ends"])},
        )
        for note, begin, end in zip(notes, limits[:-1], limits[1:], strict=True)
    ]


def run(place: Path) -> None:
    """Prepare the job of a folder and write the result beside it."""
    job = json.loads((place / "job.json").read_text(encoding="ascii"))
    encoder = TextEncoder(EncoderState(**job["state"]))
    renderer = None
    if job["template"] is not None:
        source, name = job["template"]
        renderer = ChatRenderer(source, name, encoder.state.special_tokens_map, encoder.state.special_tokens)
    preparer = RowPreparer(encoder, renderer, train_on=job["train_on"], system_prompt=job["system_prompt"])
    examples = [_example(value) for value in job["examples"]]
    try:
        rows = [row for at in range(0, len(examples), CHUNK) for row in preparer.prepare(examples[at : at + CHUNK])]
    except DataError as fault:
        write_json(place / "refused.json", str(fault))
        return
    lengths = [len(row.ids) for row in rows]
    arrays = {
        "ids": np.concatenate([*(row.ids for row in rows), np.zeros(0, np.int32)]),
        "trained": np.concatenate([*(row.trained for row in rows), np.zeros(0, bool)]),
        "limits": np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
    }
    save_file(arrays, place / "rows.safetensors")
    names = ("fault", "answers", "ended", "untrained_ends", "literals")
    write_json(place / "rows.json", [{name: getattr(row, name) for name in names} for row in rows])


def _example(value: dict[str, Any]) -> Example:
    for key in ("messages", "chosen", "rejected"):
        value[key] = [Message(**message) for message in value[key]]
    return Example(**value)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
