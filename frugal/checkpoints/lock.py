"""One run at a time in a folder: `run.lock` holds who is writing."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from frugal.checkpoints.write import recover
from frugal.distributed import group as ranks
from frugal.errors import CheckpointError

LOCK_NAME = "run.lock"
_SILENT_SECONDS = 3600.0
"""A lock from another machine that has shown no sign of life for so long is taken for stale."""


class RunLock:
    """Holds a run's folder; makes the folder if need be. A lock of a dead process is recognised and replaced."""

    def __init__(self, run_dir: Path, say: Callable[[str], None] = print) -> None:
        self.path = Path(run_dir) / LOCK_NAME
        self._say = say
        self._token = secrets.token_hex(8)
        self._held = False
        self._made: list[Path] = []  # folders that were not there, innermost first

    def __enter__(self) -> RunLock:
        try:
            folder = self.path.parent.absolute()
            self._made = [place for place in (folder, *folder.parents) if not place.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise CheckpointError(
                f"cannot write to output.dir {self.path.parent}: {error.strerror}. "
                "Set output.dir to a folder that you may write to."
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held and _read(self.path).get("token") == self._token:
            with contextlib.suppress(OSError):  # a folder that became read-only: the lock is recognised as stale
                self.path.unlink()
                for folder in self._made:  # the run failed before it wrote anything: leave nothing
                    folder.rmdir()  # refuses a folder that holds something, and with it those above
        self._held = False

    def alive(self) -> None:
        """Show a sign of life, for processes on other machines. Raises when the lock was taken by another run."""
        holder = _read(self.path)
        if holder.get("token") not in (None, self._token):
            raise CheckpointError(f"{self.path.parent} was taken over by another run ({_who(holder)}); stopping.")
        with contextlib.suppress(OSError):  # a full disk or a removed lock is no reason to stop training
            os.utime(self.path)

    def _take(self) -> None:
        for _ in range(3):
            if self._create():
                return
            holder = _read(self.path)
            reason = _why_stale(holder, self.path)
            if reason is None:
                raise CheckpointError(
                    f"{self.path.parent} is in use by {_who(holder)}. Wait for that run, stop it, or set another "
                    f"output.dir. If that process is gone, delete {self.path}."
                )
            # rename, then look at what was renamed: of two processes that saw the same stale lock, one finds that
            # it took the other's new lock away, and gives it back
            aside = self.path.with_name(f".{LOCK_NAME}.{self._token}.stale")
            try:
                self.path.rename(aside)
            except FileNotFoundError:
                continue
            if _read(aside) != holder:
                aside.rename(self.path)
                continue
            aside.unlink()
            self._say(f"removed a stale lock: {reason}")
        raise CheckpointError(f"{self.path} changes while this run tries to take it: another run is starting there")

    def _create(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        me = {
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "token": self._token,
        }
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(me, stream)
        self._held = True
        return True


@contextlib.contextmanager
def hold(run_dir: Path, say: Callable[[str], None] = print) -> Iterator[RunLock | None]:
    """Hold a run's folder for the whole group of processes: rank 0 has the lock (others get None), all fail together.

    What a killed process left half written is tidied up.
    """
    with contextlib.ExitStack() as stack:
        lock = RunLock(run_dir, say) if ranks.rank() == 0 else None

        def take() -> None:
            if lock is not None:
                stack.enter_context(lock)
                recover(run_dir, say)

        ranks.on_first(take)
        yield lock


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "an unknown process"
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _why_stale(holder: dict[str, Any], path: Path) -> str | None:
    """Why the lock is stale, or None while its process may live."""
    try:
        silent = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return "it is gone"
    if not holder:
        # created and not yet filled by a process that is starting, or cut off by a power failure
        return "it is empty" if silent > 10 else None
    if holder.get("host") != socket.gethostname():
        if silent > _SILENT_SECONDS:
            return f"{_who(holder)} showed no sign of life for {silent / 3600:.1f} hours"
        return None
    try:
        process = psutil.Process(int(holder["pid"]))
        started = process.create_time()
        zombie = process.status() == psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError, ValueError):
        return f"{_who(holder)} is gone"
    # a number that was given to another process since; create_time is exact to a clock tick
    if zombie or abs(started - float(holder.get("process_started", 0))) > 1.0:
        return f"{_who(holder)} is gone"
    return None
