"""Ctrl-C and SIGTERM: finish the step, save, leave. A second signal leaves at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from frugal.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted, ProcessLost

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopRequest:
    """Context in which Ctrl-C and SIGTERM only set a flag that the loop reads between two steps.

    The former handlers are put back on leaving. Outside the main thread Python allows no handlers; there nothing is
    installed and the flag can still be set by `request`.
    """

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._former: dict[int, Any] = {}
        self._signal: int | None = None
        self._first = 0.0
        # under torchrun and accelerate launch one Ctrl-C arrives twice
        self._same_seconds = 3.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    @property
    def exit_code(self) -> int | None:
        """130 after Ctrl-C, 143 after SIGTERM, None when nobody asked to stop."""
        if self._signal is None:
            return None
        return EXIT_TERMINATED if self._signal == signal.SIGTERM else EXIT_INTERRUPTED

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask for a stop after the current step."""
        self._signal = number

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _NAMES:
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            # None: the handler was not installed from Python and cannot be put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._former and isinstance(error, ProcessLost):
            # the launcher sends SIGTERM to the processes that are left: not before this one has said why it ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = _NAMES[signal.Signals(number)]
        if self._signal is not None and time.monotonic() - self._first < self._same_seconds:
            return  # the terminal signals launcher and ranks alike, and the launcher passes it on
        if self._signal is not None:
            code = EXIT_TERMINATED if number == signal.SIGTERM else EXIT_INTERRUPTED
            raise Interrupted(f"stopped at once by a second {name}; the newest complete checkpoint stands.", code)
        self._signal, self._first = number, time.monotonic()
        self._say(f"{name}: finishing this step and saving; once more leaves at once.")
