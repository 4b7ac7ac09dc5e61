"""C05: the cache of tokenised data is keyed by content: never stale, never rebuilt without need, never half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from frugal.config import DataSection
from frugal.data import PreparedData, build
from tests.support.rows import CHATML, byte_tokenizer, section, write_rows

ROWS = [
    {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n}"}]}
    for n in range(6)
]


class Setting:
    """A data file, settings and a tokenizer that can be changed one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = write_rows(folder / "rows.jsonl", ROWS)
        self.settings: DataSection = section(self.file, cache=True, max_length=64)
        self.tokenizer: Any = byte_tokenizer()
        self.cache = folder / "cache"

    def build(self) -> PreparedData:
        return build(self.settings, self.tokenizer, seed=0, vocab_size=400, cache_dir=self.cache)

    def hits(self) -> bool:
        return self.build().cache_hits == 1


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    setting = Setting(tmp_path)
    assert not setting.hits()
    assert setting.hits()
    return setting


def _same(left: PreparedData, right: PreparedData) -> bool:
    pairs = [(left.train.input_ids, right.train.input_ids), (left.train.trained, right.train.trained)]
    return len(left.train) == len(right.train) and all(np.array_equal(one, other) for one, other in pairs)


def test_a_byte_of_the_data_file_with_the_same_size_and_time(setting: Setting) -> None:
    before, old = setting.file.stat(), setting.file.read_bytes()
    setting.file.write_bytes(old.replace(b"answer 3", b"answer 7"))
    os.utime(setting.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = setting.file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert not setting.hits()
    setting.file.write_bytes(old)
    assert setting.hits()


def test_the_template_text(setting: Setting) -> None:
    setting.tokenizer.chat_template = CHATML + " "
    assert not setting.hits()


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 63},
        {"train_on": "last"},
        {"train_on": "all"},
        {"system_prompt": "be kind"},
        {"packing": True},
        {"on_overflow": "drop"},
    ],
    ids=str,
)
def test_settings_that_change_tokens_or_masks(setting: Setting, change: dict[str, Any]) -> None:
    setting.settings = setting.settings.model_copy(update=change)
    assert not setting.hits()


def test_an_added_token(setting: Setting) -> None:
    setting.tokenizer.add_tokens([AddedToken("answer", special=True)], special_tokens=True)
    assert not setting.hits()


def test_the_tokenizer_files_content_at_the_same_path(setting: Setting) -> None:
    from transformers import AutoTokenizer

    place = setting.folder / "tokenizer"
    byte_tokenizer(merges=[("a", "n")]).save_pretrained(place)
    setting.tokenizer = AutoTokenizer.from_pretrained(place)
    assert not setting.hits()
    byte_tokenizer(merges=[("s", "w")]).save_pretrained(place)
    setting.tokenizer = AutoTokenizer.from_pretrained(place)
    assert not setting.hits()
    assert setting.hits()


def test_things_that_change_no_token_hit_the_cache(setting: Setting) -> None:
    first = setting.build()
    os.utime(setting.file)
    assert setting.hits()
    moved = setting.folder / "elsewhere" / "other name.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(setting.file.read_bytes())
    setting.settings = section(moved, cache=True, max_length=64, num_proc=2)
    again = setting.build()  # another path, another number of processes; seed and output folder are not even known
    assert again.cache_hits == 1
    assert _same(first, again)
    assert again.train_sources[0] == f"{moved}:1"


def test_account_and_report_come_back_whole(setting: Setting) -> None:
    rows = [*ROWS, {"messages": [{"role": "user", "content": "no answer"}]}]
    setting.settings = section(write_rows(setting.file, rows), cache=True, max_length=64)
    fresh, cached = setting.build(), setting.build()
    assert (fresh.cache_hits, cached.cache_hits) == (0, 1)
    assert fresh.report.to_json() == cached.report.to_json()
    assert fresh.template_report.to_json() == cached.template_report.to_json()
    assert isinstance(cached.train.input_ids, np.memmap)
    assert _same(fresh, cached)


def _entry(setting: Setting) -> Path:
    (entry,) = [path for path in setting.cache.iterdir() if path.is_dir()]
    return entry


def test_a_half_written_entry_is_never_used(setting: Setting) -> None:
    whole = build(section(setting.file, max_length=64), setting.tokenizer, seed=0, vocab_size=400)
    entry = _entry(setting)
    tokens = entry / "tokens.safetensors"
    tokens.write_bytes(tokens.read_bytes()[:-10])
    repaired = setting.build()
    assert repaired.cache_hits == 0
    assert _same(whole, repaired)
    (_entry(setting) / "meta.json").unlink()
    assert not setting.hits()
    (_entry(setting) / "meta.json").write_text('{"key": ', encoding="utf-8")
    assert not setting.hits()
    assert setting.hits()


_SCRIPT = """
import json, sys
from pathlib import Path
import frugal.data.cache as cache
from frugal.config import DataSection
from frugal.data import build
from transformers import AutoTokenizer

folder, wait = Path(sys.argv[1]), sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
settings = DataSection.model_validate_json((folder / "data.json").read_text(encoding="utf-8"))
if wait == "die":
    import os
    from frugal.data import pipeline
    def store(place, key, dataset, count):
        beside = place / f".{key}.0.tmp"
        beside.mkdir()
        (beside / "tokens.safetensors").write_bytes(b"half")
        os._exit(9)
    cache.store = store
prepared = build(settings, tokenizer, seed=0, vocab_size=400, cache_dir=folder / "cache")
print(json.dumps([prepared.cache_hits, prepared.train.input_ids.tolist()]))
"""


def _script(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(_SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "script.py"), str(folder), mode]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    file = write_rows(tmp_path / "rows.jsonl", ROWS * 50)
    (tmp_path / "data.json").write_text(section(file, cache=True).model_dump_json(), encoding="utf-8")
    return tmp_path


def test_two_processes_at_once_give_one_good_entry(shared_folder: Path) -> None:
    running = [_script(shared_folder, "go") for _ in range(2)]
    results = []
    for process in running:
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors.decode()
        results.append(json.loads(out))
    assert sorted(hits for hits, _ in results) == [0, 1]  # the second one waited and used the first one's work
    assert results[0][1] == results[1][1]
    assert len([path for path in (shared_folder / "cache").iterdir() if path.is_dir()]) == 1


def test_a_process_killed_while_writing_leaves_nothing_that_is_used(shared_folder: Path) -> None:
    started = time.monotonic()
    killed = _script(shared_folder, "die")
    killed.communicate(timeout=600)
    assert killed.returncode == 9
    after = _script(shared_folder, "go")
    out, errors = after.communicate(timeout=600)
    assert after.returncode == 0, errors.decode()
    assert json.loads(out)[0] == 0
    assert time.monotonic() - started < 100  # the dead process's lock is not waited for


def test_a_cache_folder_that_cannot_be_written_stops_nothing(setting: Setting) -> None:
    setting.cache = setting.folder / "rows.jsonl" / "cache"  # a file is in the way, also for root
    said: list[str] = []
    prepared = build(
        setting.settings, setting.tokenizer, seed=0, vocab_size=400, cache_dir=setting.cache, say=said.append
    )
    assert len(prepared.train) == 6
    assert len(said) == 1
    assert "cannot be used" in said[0]


def test_entries_that_no_run_uses_any_more_go_away(setting: Setting) -> None:
    old = _entry(setting)
    left_behind = setting.cache / ".abc.1.tmp"
    left_behind.mkdir()
    long_ago = time.time() - 70 * 86400
    os.utime(old / "meta.json", (long_ago, long_ago))
    os.utime(left_behind, (long_ago, long_ago))
    assert setting.hits()  # a hit marks it as used
    setting.settings = setting.settings.model_copy(update={"max_length": 63})
    setting.build()
    assert old.is_dir()
    assert not left_behind.exists()
    os.utime(old / "meta.json", (long_ago, long_ago))
    setting.settings = setting.settings.model_copy(update={"max_length": 62})
    setting.build()
    assert not old.exists()
