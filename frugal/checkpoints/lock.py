"""One run at a time in a folder. The kernel holds the lock and frees it when the process ends, however it ends.

Between machines that share a folder the lock holds as far as their file system shares it: NFS does, unless it is
mounted with `nolock` or `local_lock`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from frugal.checkpoints.write import recover
from frugal.distributed import group as ranks
from frugal.errors import CheckpointError

LOCK_NAME = "run.lock"
"""The file that names the holder, as JSON; there while a run is going on, and after it was killed."""
_KERNEL_LOCK = ".run.lock"
"""The file whose lock counts. It stays: another process may have opened it already."""


class RunLock:
    """Lock a run's folder; makes the folder if need be."""

    def __init__(self, run_dir: Path, say: Callable[[str], None] = print) -> None:
        self.path = Path(run_dir) / LOCK_NAME
        self._say = say
        self._lock = FileLock(self.path.with_name(_KERNEL_LOCK), timeout=0)
        self._made: list[Path] = []  # folders that were not there, innermost first

    def __enter__(self) -> RunLock:
        folder = self.path.parent.absolute()
        try:
            self._made = [place for place in (folder, *folder.parents) if not place.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except Timeout:
            raise CheckpointError(
                f"{self.path.parent} is in use by {self._holder()}. Wait for that run, stop it, or set another "
                "output.dir."
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"cannot write to output.dir {self.path.parent}: {error.strerror}. "
                "Set output.dir to a folder that you may write to."
            ) from error
        return self

    def _take(self) -> None:
        try:
            self._lock.acquire()
        except NotImplementedError:
            self._say(f"{self.path.parent}: this file system has no locks; start no other run with this output.dir")
        try:
            if self.path.exists():
                self._say(
                    f"removed a stale lock: {self._holder()} is gone (if it runs on a machine whose file system shares "
                    "no locks with this one, stop one of the two)"
                )
            me = {"pid": os.getpid(), "host": socket.gethostname()}
            self.path.write_text(json.dumps(me), encoding="utf-8")
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a folder that became read-only: the file is recognised as stale
            self.path.unlink(missing_ok=True)
            if self._made and set(self.path.parent.iterdir()) <= {self.path.with_name(_KERNEL_LOCK)}:
                self.path.with_name(_KERNEL_LOCK).unlink(missing_ok=True)
                for folder in self._made:  # the run failed before it wrote anything: leave nothing
                    folder.rmdir()
        self._lock.release()

    def _holder(self) -> str:
        """`process 4711 on gpu-b`"""
        try:
            holder: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return f"process {holder['pid']} on {holder['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "an unknown process"


@contextlib.contextmanager
def run_lock(run_dir: Path, say: Callable[[str], None] = print) -> Iterator[None]:
    """Lock a run's folder for the whole group of processes: rank 0 has the lock, all fail together.

    What a killed process left half written is tidied up.
    """
    with contextlib.ExitStack() as stack:

        def take() -> None:
            stack.enter_context(RunLock(run_dir, say))
            recover(run_dir, say)

        ranks.on_first(take)
        yield
