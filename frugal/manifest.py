"""Write what ran: versions, configuration, decisions with their reasons, measured bytes, seconds of each phase.

``manifest.json`` is rewritten whole at each stage of a run (start, end, failure), so what is on disk is always readable
and says how far the run came. This layer takes plain values and `Decision`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from frugal import __version__
from frugal.decision import Decision
from frugal.errors import CheckpointError
from frugal.files import read_json, write_json

FORMAT = 1
FILE_NAME = "manifest.json"
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "datasets",
    "safetensors",
    "tokenizers",
    "triton",
    "numpy",
)


def versions() -> dict[str, str]:
    """Versions of the packages that decide a result, of Python and of the platform. Imports none of them."""
    found = {"frugal": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version(), "platform": platform.platform()}


def git_commit() -> dict[str, Any] | None:
    """Commit of the checkout that this package runs from, and whether it has local changes; None when installed."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or a checkout of another user: the manifest then says nothing about it
    return {"commit": commit, "local_changes": changed}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Manifest:
    """Builder of a run's ``manifest.json``: sections of plain values, timings and measured peaks by phase."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        self.content: dict[str, Any] = dict(content or {})
        if not content:
            self.content = {"format": FORMAT, "status": "created", "created": now(), "versions": versions()}
            words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
            self.content["command"] = [word.encode("utf-8", "replace").decode() for word in words]
            if commit := git_commit():
                self.content["source"] = commit

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read ``path`` (a manifest file, or a folder that holds one).

        Raises:
            CheckpointError: no manifest there, or not readable.
        """
        file = path / FILE_NAME if path.is_dir() else path
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist: {path} is not the folder of a run.")
        try:
            content = read_json(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{file} is not a manifest: a JSON object is expected.")
        return cls(content)

    def add(self, section: str, value: Any) -> None:
        """Set a section; a mapping is merged into a mapping that is there already."""
        value = _plain(value)
        present = self.content.get(section)
        if isinstance(present, dict) and isinstance(value, dict):
            present.update(value)
        else:
            self.content[section] = value

    def decide(self, decision: Decision[Any]) -> None:
        """Record a decision under ``implementations``: what was chosen, why, and why each alternative was not."""
        self.add("implementations", {decision.key: decision.to_json()})

    def peak(self, phase: str, peak_bytes: int) -> None:
        """Record the measured peak of a phase (load, step, evaluate, save), in bytes; the highest stays."""
        before = self.content.get("measured_peak_bytes", {}).get(phase, 0)
        self.add("measured_peak_bytes", {phase: max(int(peak_bytes), before)})

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the seconds of a phase, added up when it is entered again; recorded when it fails too."""
        start = time.perf_counter()
        try:
            yield
        finally:
            before = self.content.get("seconds", {}).get(phase, 0.0)
            self.add("seconds", {phase: round(before + time.perf_counter() - start, 3)})

    def started(self) -> None:
        """The run is under way."""
        self.content.update(status="running", started=now())

    def finished(self, result: Mapping[str, Any] | None = None) -> None:
        """The run came to its end."""
        self.content.update(status="finished", ended=now())
        self.content.pop("error", None)
        if result:
            self.add("result", result)

    def failed(self, error: BaseException, *, status: str = "failed") -> None:
        """The run stopped early; ``status`` is "failed" or "interrupted"."""
        self.content.update(status=status, ended=now())
        self.content["error"] = {"type": type(error).__name__, "message": str(error)[:2000]}

    def write(self, path: Path) -> None:
        """Write atomically to ``path`` (a file, or the run's folder)."""
        path = Path(path)
        write_json(path if path.suffix == ".json" else path / FILE_NAME, self.content)


def _plain(value: Any) -> Any:
    """JSON values only: paths and dtypes become text, tuples lists; anything else is a programming error later."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
