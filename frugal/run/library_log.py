"""What libraries warn of and log goes to a file of the run: the terminal shows the run's own lines."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType

from frugal.console import say
from frugal.errors import FrugalError

FILE_NAME = "libraries.log"
_MOST_HELD = 10_000


class LibraryLog:
    """Context of one run: Python warnings and records of loggers are held until `write_to` names a file.

    Handlers that libraries gave their loggers for the terminal are put back when the run ends; those that the user
    gave the root logger stay. What `frugal` itself logs is shown. An error that is not the user's shows what was held.
    """

    def __init__(self, show: Callable[[str], None] = say) -> None:
        self._held = MemoryHandler(_MOST_HELD, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self._own = _Shown(show)
        self._changed: list[tuple[logging.Logger, logging.Handler, bool]] = []
        self._captures = False

    def __enter__(self) -> LibraryLog:
        self._captures = getattr(warnings.showwarning, "__module__", "") != "logging"  # the caller captures already
        if self._captures:
            logging.captureWarnings(True)
        self._put(logging.getLogger(), self._held)
        self._put(logging.getLogger("frugal"), self._own)
        self._take_over()
        return self

    def write_to(self, path: Path) -> None:
        """From here on into this file, which is made when there is something to write."""
        file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._held.setTarget(file)
        self._held.flush()
        self._held.capacity = 1  # each record at once
        self._take_over()  # libraries that were imported since

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._captures:
            logging.captureWarnings(False)
        for logger, handler, was_there in reversed(self._changed):
            (logger.addHandler if was_there else logger.removeHandler)(handler)
        logging.getLogger("frugal").propagate = True
        unexpected = isinstance(error, Exception) and not isinstance(error, FrugalError)
        if self._held.target is None and unexpected:
            self._held.setTarget(logging.StreamHandler())
        if self._held.target is not None:
            self._held.flush()
            self._held.target.close()
        self._held.close()

    def _put(self, logger: logging.Logger, handler: logging.Handler) -> None:
        logger.addHandler(handler)
        self._changed.append((logger, handler, False))
        if logger.name == "frugal":
            logger.propagate = False

    def _take_over(self) -> None:
        for logger in list(logging.root.manager.loggerDict.values()):
            if not isinstance(logger, logging.Logger) or logger.name.partition(".")[0] == "frugal":
                continue
            terminal = [handler for handler in logger.handlers if _to_terminal(handler)]
            for handler in terminal:
                logger.removeHandler(handler)
                self._changed.append((logger, handler, True))
            if not logger.propagate and self._held not in logger.handlers:
                self._put(logger, self._held)


class _Shown(logging.Handler):
    """Warnings of frugal's own modules, as lines."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(f"warning: {record.getMessage()}")


def _to_terminal(handler: logging.Handler) -> bool:
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return False
    return not isinstance(handler.stream, io.StringIO)
