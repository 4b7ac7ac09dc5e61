"""E02: spawned workers, scripts without a main guard, code pages and odd paths, through the whole product.

tests/data/test_worker.py holds the same for data preparation alone, with workers that cannot start or that die.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import runs

TALK = [("→ 你好 🙂", "→ ça va 👍"), ("Größe?", "zwölf µm"), ("naïve", "日本")]

SCRIPT = """\
import frugal
print("main runs")
frugal.preview({config!r}, rows=2)
result = frugal.train({config!r})
print("steps", result.steps)
"""


@pytest.fixture
def place(tmp_path: Path, tiny_llama_folder: Path) -> tuple[Path, Path]:
    """Names with a space and letters of several scripts: (folder, configuration in it)."""
    return make_place(tmp_path / "mein Ordner → 模型", tiny_llama_folder, "base ü", "Gespräche 1", "Lauf é")


def make_place(folder: Path, tiny: Path, base: str, rows: str, run_dir: str) -> tuple[Path, Path]:
    """A folder with everything below it, and its configuration."""
    folder.mkdir()
    file = folder / f"{rows}.jsonl"
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in TALK * 4]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    (folder / base).symlink_to(tiny, target_is_directory=True)
    more: dict[str, Any] = {
        "train": {"max_steps": 2},
        "data": {"num_proc": 2, "system_prompt": "sei knapp 🙂"},
        "output": {"dir": str(folder / run_dir), "sample_prompts": ["→ 你好 🙂"], "sample_max_new_tokens": 4},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(runs.config(folder / base, file, folder, **more), allow_unicode=True), "utf-8")
    return folder, path


def environment(**more: str) -> dict[str, str]:
    """A process whose locale knows ASCII alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))}
    repository = str(Path(__file__).resolve().parents[2])
    return {**kept, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": repository, "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], env: dict[str, str], text: str = "") -> str:
    done = subprocess.run(command, env=env, input=text.encode(), capture_output=True, timeout=240)
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-3000:]
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")[-3000:]
    return done.stdout.decode(errors="replace")


@pytest.mark.parametrize("encoding", ["", "gbk"])
def test_the_commands_under_other_code_pages(place: tuple[Path, Path], encoding: str) -> None:
    folder, config = place
    # PYTHONIOENCODING is how a Windows console's code page looks from inside
    env = environment(**({"PYTHONIOENCODING": encoding} if encoding else {}))
    frugal = [sys.executable, "-m", "frugal"]
    run([*frugal, "preview", str(config)], env)
    run([*frugal, "train", str(config)], env)
    run([*frugal, "chat", str(folder / "Lauf é"), "--prompt", "→ 你好 🙂", "--max-new-tokens", "4"], env)
    samples = json.loads((folder / "Lauf é" / "samples.json").read_text(encoding="utf-8"))
    assert samples[0]["prompt"] == "→ 你好 🙂"
    saved = yaml.safe_load((folder / "Lauf é" / "config.yaml").read_text(encoding="utf-8"))
    assert saved["data"]["system_prompt"] == "sei knapp 🙂"
    assert "→ 你好 🙂" in (folder / "Lauf é" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("way", ["script", "stdin"])
def test_without_a_main_guard_nothing_starts_over(tmp_path: Path, tiny_llama_folder: Path, way: str) -> None:
    """Two workers; their processes must not run the user's script again. Names are ASCII, texts are not."""
    folder, config = make_place(tmp_path / "a folder", tiny_llama_folder, "base", "rows", "run")
    source = SCRIPT.replace("{config!r}", repr(str(config)))
    (folder / "main.py").write_text(source, encoding="ascii")
    command = [sys.executable, str(folder / "main.py")] if way == "script" else [sys.executable, "-"]
    lines = run(command, environment(), source if way == "stdin" else "").splitlines()
    assert lines.count("main runs") == 1
    assert lines.count("steps 2") == 1
    manifest = json.loads((folder / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert not any("one process" in note for note in manifest["data"].get("notes", []))  # workers did the work


def test_a_path_that_the_file_system_encoding_lacks_is_one_message(place: tuple[Path, Path]) -> None:
    _, config = place
    source = f"import frugal\ntry:\n    frugal.load_config({str(config)!a})\nexcept frugal.errors.ConfigError as e:\n"
    text = run([sys.executable, "-c", source + "    print(e)\n"], environment())
    assert "ascii" in text
    assert "-X utf8" in text
