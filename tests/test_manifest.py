"""The manifest: readable at every stage, plain JSON, with what decides a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from frugal.decision import Decision
from frugal.errors import CheckpointError
from frugal.manifest import FILE_NAME, Manifest, git_commit, versions


def test_stages_are_on_disk(tmp_path: Path) -> None:
    manifest = Manifest()
    manifest.add("config", {"model": {"base": Path("a/b")}})
    manifest.started()
    manifest.write(tmp_path)
    assert json.loads((tmp_path / FILE_NAME).read_text())["status"] == "running"
    manifest.failed(ValueError("x" * 5000))
    manifest.write(tmp_path)
    failed = json.loads((tmp_path / FILE_NAME).read_text())
    assert failed["status"] == "failed"
    assert failed["error"]["type"] == "ValueError"
    assert len(failed["error"]["message"]) == 2000
    again = Manifest.read(tmp_path)
    again.finished({"eval_loss": 1.5})
    again.write(tmp_path)
    done = json.loads((tmp_path / FILE_NAME).read_text())
    assert done["status"] == "finished"
    assert "error" not in done
    assert done["result"] == {"eval_loss": 1.5}
    assert done["config"] == {"model": {"base": str(Path("a/b"))}}
    assert done["created"].endswith("+00:00")
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_sections_merge_and_peaks_keep_the_highest() -> None:
    manifest = Manifest()
    manifest.decide(Decision("attention", "frugal", "sm_80", {"flash_attn": "not installed"}))
    manifest.decide(Decision("loss", "chunked", ""))
    for peak in (5, 9, 7):
        manifest.peak("step", peak)
    with pytest.raises(RuntimeError), manifest.timed("load"):
        raise RuntimeError
    with manifest.timed("load"):
        pass
    content = manifest.content
    assert content["implementations"] == {
        "attention": {"chosen": "frugal", "why": "sm_80", "rejected": {"flash_attn": "not installed"}},
        "loss": {"chosen": "chunked"},
    }
    assert content["measured_peak_bytes"] == {"step": 9}
    assert content["seconds"]["load"] >= 0


def test_versions_and_commit() -> None:
    found = versions()
    assert {"frugal", "torch", "transformers", "peft", "python", "platform"} <= set(found)
    commit = git_commit()
    if (Path(__file__).parent.parent / ".git").exists():
        assert commit is not None
        assert len(commit["commit"]) == 40


def test_reading_what_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        Manifest.read(tmp_path)
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(tmp_path)
    (tmp_path / FILE_NAME).write_text("[]")
    with pytest.raises(CheckpointError, match="not a manifest"):
        Manifest.read(tmp_path)


def test_the_module_is_light() -> None:
    code = "import sys, frugal.manifest; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
