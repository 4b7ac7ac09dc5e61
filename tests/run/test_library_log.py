"""Libraries' warnings go to a file of the run, never to the terminal (U14)."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

import frugal.run.train as run
from frugal.run.library_log import FILE_NAME, LibraryLog
from tests.support import runs


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    """A logger as transformers, torch and datasets have it: a handler of its own for the terminal, and no parents."""
    logger = logging.getLogger("some_library")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger
    assert handler in logger.handlers  # as it was, beside those of pytest
    assert not any(isinstance(one, MemoryHandler) for one in logger.handlers)
    logger.removeHandler(handler)


def speak(library: logging.Logger) -> None:
    warnings.warn("a peft-like warning", UserWarning, stacklevel=1)
    library.warning("kind one")
    logging.getLogger("without.handlers").warning("kind two")
    try:
        raise ValueError("deep inside")
    except ValueError:
        logging.getLogger("some_library.part").exception("went on")


def test_before_and_after_there_is_a_folder(
    tmp_path: Path, library: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    """Held until the folder exists; tracebacks too; each once. What frugal logs is shown."""
    shown: list[str] = []
    with LibraryLog(shown.append) as log:
        speak(library)
        log.write_to(tmp_path / FILE_NAME)
        speak(library)
        logging.getLogger("frugal.adapters").warning("ours")
    text = (tmp_path / FILE_NAME).read_text()
    for part in ("a peft-like warning", "kind one", "kind two", "went on", "ValueError: deep inside"):
        assert text.count(part) == 2, part
    assert "ours" not in text
    assert shown == ["warning: ours"]
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("frugal").propagate


def test_nothing_said_leaves_no_file(tmp_path: Path) -> None:
    with LibraryLog() as log:
        log.write_to(tmp_path / FILE_NAME)
    assert not list(tmp_path.iterdir())


def test_an_unexpected_error_shows_what_was_held(library: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with LibraryLog():
            library.warning("the reason")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "the reason" in capfd.readouterr().err


def test_a_run_shows_its_own_lines_only(
    tiny_llama_folder: Path,
    tmp_path: Path,
    library: logging.Logger,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that speaks while rows are prepared and while the model is loaded."""
    for name in ("open_tokenizer", "load_model"):
        step = getattr(run, name)
        monkeypatch.setattr(run, name, lambda *args, step=step: (speak(library), step(*args))[1])
    config = runs.config(tiny_llama_folder, runs.write_rows(tmp_path / "rows.jsonl", 4), tmp_path / "run")
    config["train"].update(max_steps=1)
    run.train(config)
    said = capfd.readouterr()
    assert said.err == ""
    assert "kind" not in said.out
    text = (tmp_path / "run" / FILE_NAME).read_text()
    assert text.count("kind one") == 2
    assert "ValueError: deep inside" in text
