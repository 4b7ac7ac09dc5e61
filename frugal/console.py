"""Printing that never ends a run: characters the stream cannot encode are escaped, a closed stream is ignored."""

from __future__ import annotations

import io
import sys
from typing import IO, TextIO, cast

from rich.console import Console


class SafeStream(io.TextIOBase):
    """A text stream that cannot raise on writing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            plain = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            self._stream.write(plain)
        except (OSError, ValueError):
            # `| head` closed the pipe, or the notebook's stream is gone: the run is worth more than its messages
            return 0
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def say(text: str) -> None:
    """Print one message safely, whatever the terminal's encoding."""
    stream = SafeStream(sys.stdout)
    stream.write(text + "\n")
    stream.flush()


def safe_console() -> Console:
    """A rich console on standard output that cannot raise on printing."""
    return Console(file=cast("IO[str]", SafeStream(sys.stdout)))
