"""What is shown and logged while a run goes on."""

from __future__ import annotations

import io
import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from frugal.console import SafeStream, say
from frugal.run.progress import Reporter
from frugal.run.summary import TrainResult, summary_lines
from frugal.training.log import TrainLog, read_log


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 2.5,
        "learning_rate": 1e-4,
        "tokens_per_second": 1234.5,
        "peak_memory_bytes": 2**30,
        **more,
    }


def test_a_log_file_gets_plain_lines_at_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(1000)
    for step in range(1, 1001):
        reporter.step(record(step))
    reporter.close()
    lines = capsys.readouterr().out.splitlines()
    assert 20 <= len(lines) <= 22
    assert "\x1b" not in "".join(lines)
    assert "\r" not in "".join(lines)
    assert lines[0].startswith("step 1/1000  epoch 0.10  loss 2.5000  lr 1.00e-04  1,234 tok/s  1.00 GiB  left ")
    assert lines[-1].startswith("step 1000/1000")


def test_evaluations_are_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(1000)
    for step in (1, 3, 4):
        reporter.step(record(step, **({"eval_loss": 1.25} if step == 3 else {})))
    assert "eval 1.2500" in capsys.readouterr().out.splitlines()[1]


def test_a_terminal_gets_a_live_bar_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    threads = threading.active_count()
    reporter = Reporter(2)
    reporter.step(record(1))
    reporter.say("checkpoint-1 saved")
    reporter.step(record(2))
    assert threading.active_count() == threads
    reporter.close()
    reporter.close()
    text = terminal.getvalue()
    assert "step 2/2" in text
    assert "checkpoint-1 saved" in text


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk"])
def test_what_a_stream_cannot_encode_is_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    say("loss → 1.5 🎉 中")
    assert raw.getvalue().startswith(b"loss ")
    assert b"1.5 \\U0001f389" in raw.getvalue()


def test_a_closed_stream_ends_nothing() -> None:
    stream = io.StringIO()
    safe = SafeStream(stream)
    stream.close()
    assert safe.write("x") == 0
    safe.flush()
    assert not safe.isatty()


def test_quiet_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(2, quiet=True)
    reporter.step(record(1))
    reporter.say("x")
    reporter.close()
    assert capsys.readouterr().out == ""


def test_log_restarts_at_a_step(tmp_path: Path) -> None:
    log = TrainLog(tmp_path / "train_log.jsonl")
    for step in range(5):
        log.write({"step": step, "loss": 0.1 + 0.2, "nan": float("nan")})
    with open(log.path, "a") as handle:
        handle.write('{"step": 5, "lo')  # killed in the middle of a line
    log.restart(3)
    assert [entry["step"] for entry in read_log(log.path)] == [0, 1, 2, 3]
    assert read_log(log.path)[0] == {"step": 0, "loss": 0.30000000000000004, "nan": None}
    assert all(json.loads(line) for line in log.path.read_text().splitlines())


def test_a_notebook_gets_one_line_that_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/plain"])
        return Handle()

    shell = type("ZMQInteractiveShell", (), {})()
    ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    reporter = Reporter(2)
    reporter.step(record(1))
    reporter.step(record(2))
    reporter.close()
    assert shown[0] == "starting"
    assert [line.split("  ")[0] for line in shown[1:]] == ["step 1/2", "step 2/2"]
    assert capsys.readouterr().out == ""


def test_the_commands_of_the_summary_can_be_pasted() -> None:
    result = TrainResult(Path("runs/my first"), 1, 1.0, None, None, None, None, 1, 1.0, 1)
    assert summary_lines(result, [], {})[-2] == "  talk to it:  frugal chat 'runs/my first'"
