"""Ctrl-C and SIGTERM: in training finish the step, save, leave; a second one, and one elsewhere, leaves at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from frugal.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted, ProcessLost

_CLEANUP_SECONDS = 3.0
"""After the first signal; a second one would leave a lock or half a cache behind."""
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopAtOnce:
    """Context in which Ctrl-C and SIGTERM leave at once: all cleanup runs, and one line says what was going on.

    A `StopRequest` inside takes over while there are steps to finish. Outside the main thread nothing is installed.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        """``describe``: what was going on and what stands, after the signal's name: "while loading: ..."."""
        self._describe = describe
        self._former: dict[int, Any] = {}
        self._signal: int | None = None
        self._first = 0.0

    def __enter__(self) -> StopAtOnce:
        if threading.current_thread() is threading.main_thread():
            for number in _NAMES:
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _put_back(self._former)
        if self._signal is not None and isinstance(error, KeyboardInterrupt):
            name = _NAMES[signal.Signals(self._signal)]
            raise Interrupted(f"{name} {self._describe()}", _exit_code(self._signal)) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and time.monotonic() - self._first < _CLEANUP_SECONDS:
            return  # impatience, or a launcher that passes on what the terminal sent to all
        self._signal, self._first = self._signal or number, time.monotonic()
        # no FrugalError here: a proof or a library that catches Exception would take it for its own
        raise KeyboardInterrupt


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
        return None if self._signal is None else _exit_code(self._signal)

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
        mine = bool(self._former)
        _put_back(self._former)
        if mine and isinstance(error, ProcessLost):
            # the launcher sends SIGTERM to the processes that are left: not before this one has said why it ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = _NAMES[signal.Signals(number)]
        if self._signal is not None and time.monotonic() - self._first < self._same_seconds:
            return  # the terminal signals launcher and ranks alike, and the launcher passes it on
        if self._signal is not None:
            text = f"stopped at once by a second {name}; the newest complete checkpoint stands."
            raise Interrupted(text, _exit_code(number))
        self._signal, self._first = number, time.monotonic()
        self._say(f"{name}: finishing this step and saving; once more leaves at once.")


def _exit_code(number: int) -> int:
    return EXIT_TERMINATED if number == signal.SIGTERM else EXIT_INTERRUPTED


def _put_back(former: dict[int, Any]) -> None:
    for number, handler in former.items():
        # None: the handler was not installed from Python and cannot be put back
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    former.clear()
