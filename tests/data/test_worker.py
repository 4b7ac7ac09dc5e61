"""E02, data part: worker processes work from scripts without a main guard and from standard input, or fall back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frugal.data import build, worker
from frugal.errors import DataError
from tests.support.rows import byte_tokenizer, section, write_rows

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"Frage {n} → 你好"},
            {"role": "assistant", "content": f"Antwort {n} 🙂"},
        ]
    }
    for n in range(7)
]


@pytest.mark.parametrize("processes", [2, 9])
def test_several_processes_give_what_one_gives(tmp_path: Path, processes: int) -> None:
    path = write_rows(tmp_path / "rows mit Ümlaut.jsonl", [*ROWS, {"messages": [{"role": "user", "content": "x"}]}])
    tokenizer = byte_tokenizer()
    one = build(section(path), tokenizer, seed=0, vocab_size=300)
    several = build(section(path, num_proc=processes), tokenizer, seed=0, vocab_size=300)
    assert np.array_equal(one.train.input_ids, several.train.input_ids)
    assert np.array_equal(one.train.trained, several.train.trained)
    assert np.array_equal(one.train.origins, several.train.origins)
    assert one.account.to_json() == several.account.to_json()
    assert one.template_report == several.template_report


_SCRIPT = """
import sys
from pathlib import Path
from frugal.config import DataSection
from frugal.data import build
from transformers import PreTrainedTokenizerFast

print("main runs")
folder = Path({folder!r})
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tok")
settings = DataSection.model_validate_json((folder / "data.json").read_text(encoding="utf-8"))
data = build(settings, tokenizer, seed=0, vocab_size=300, say=print)
print(len(data.train), int(data.train.input_ids.sum()))
"""


@pytest.mark.parametrize("way", ["script", "stdin"])
def test_without_a_main_guard_and_in_the_c_locale(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    byte_tokenizer().save_pretrained(folder / "tok")
    path = write_rows(folder / "rows.jsonl", ROWS)
    (folder / "data.json").write_text(section(path, num_proc=2).model_dump_json(), encoding="utf-8")
    source = "# -*- coding: utf-8 -*-\n" + _SCRIPT.replace("{folder!r}", ascii(str(folder)))
    (folder / "main.py").write_text(source, encoding="utf-8")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))},
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(folder / "main.py")] if way == "script" else [sys.executable, "-"]
    done = subprocess.run(
        command, input=source.encode() if way == "stdin" else None, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    expected = build(section(path), byte_tokenizer(), seed=0, vocab_size=300).train
    lines = done.stdout.decode().splitlines()
    assert lines == [
        "main runs",
        f"{len(ROWS)} {int(expected.input_ids.sum())}",
    ]  # the main script ran once, nothing fell back


def test_where_no_process_can_be_started_one_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python here"))
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    said: list[str] = []
    data = build(section(path, num_proc=2), byte_tokenizer(), seed=0, vocab_size=300, say=said.append)
    assert len(data.train) == len(ROWS)
    assert len(said) == 1
    assert "tokenising in one process" in said[0]
    assert said[0] in data.account.notes


def test_a_worker_that_dies_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_python_path", lambda: str(tmp_path))
    (tmp_path / "frugal.py").write_text("import os; os._exit(7)", encoding="utf-8")
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    said: list[str] = []
    data = build(section(path, num_proc=2), byte_tokenizer(), seed=0, vocab_size=300, say=said.append)
    assert len(data.train) == len(ROWS)
    assert len(said) == 1


def test_a_template_that_breaks_the_limits_stops_the_run_from_a_worker_too(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ 'a' * 10 ** 9 if messages | length == 1 }}{{ messages[0].content }}", encoding="utf-8")
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "assistant", "content": "x"}]}] * 4)
    with pytest.raises(DataError, match=r"own\.jinja\) was stopped"):
        build(section(path, num_proc=2, chat_template=str(template)), byte_tokenizer(), seed=0, vocab_size=300)
