"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from frugal.errors import Interrupted
from frugal.training.signals import StopAtOnce, StopRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_sets_a_flag_second_leaves_at_once(number: signal.Signals, code: int) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    said: list[str] = []
    with pytest.raises(Interrupted) as caught, StopRequest(said.append) as stop:  # noqa: PT012
        assert stop.exit_code is None
        os.kill(os.getpid(), number)
        assert stop.exit_code == code
        assert len(said) == 1
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == code
    assert {each: signal.getsignal(each) for each in before} == before


def test_handlers_of_others_come_back() -> None:
    def mine(number: int, frame: object) -> None: ...

    former = signal.signal(signal.SIGTERM, mine)
    try:
        with StopRequest():
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, former)


def test_another_thread_has_no_handlers_and_can_be_asked() -> None:
    outcome: list[object] = []

    def run() -> None:
        with StopRequest() as stop:
            outcome.append(stop.exit_code)
            stop.request()
            outcome.append(stop.exit_code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcome == [None, 130]


def test_under_a_launcher_one_signal_may_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest(lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher passes on what the terminal sent to all
        assert stop.exit_code == 130
        monkeypatch.setattr(stop, "_first", stop._first - 10)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_outside_steps_one_leaves_at_once_and_cleanup_runs(number: signal.Signals, name: str, code: int) -> None:
    """U12. Nothing that catches Exception (a proof, a library) can take the stop for a fault of its own."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    cleaned: list[int] = []

    def load() -> None:
        try:
            os.kill(os.getpid(), number)
        except Exception:
            cleaned.append(-1)
        finally:
            os.kill(os.getpid(), number)  # again, while cleaning up
            cleaned.append(1)

    with pytest.raises(Interrupted, match=rf"^{name} while loading: nothing is saved$") as caught:  # noqa: SIM117
        with StopAtOnce(lambda: "while loading: nothing is saved"):
            load()
    assert caught.value.exit_code == code
    assert cleaned == [1]
    assert {each: signal.getsignal(each) for each in before} == before
