"""benchmarks/README.md names every script with one command, and each answers --help."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(text) for text in re.findall(r"^\| `(python benchmarks/[^`]+)`", README, re.MULTILINE)]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "benchmarks").glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)


def test_every_script_has_one_command() -> None:
    assert sorted(words[1] for words in COMMANDS) == SCRIPTS


def test_every_module_is_named() -> None:
    assert not [path.name for path in (ROOT / "benchmarks").glob("*.py") if f"benchmarks/{path.name}" not in README]


def test_every_result_is_written_by_a_command() -> None:
    results = [path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks/results").iterdir()]
    assert not [path for path in results if not path.startswith("benchmarks/results/gpu_") and path not in README]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What each script prints for --help; one process, which imports what they share once."""
    program = """
import contextlib, io, json, runpy, sys
found = {}
for script in sys.argv[1:]:
    sys.argv, text = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, (script, ended.code)
    found[script] = text.getvalue()
print(json.dumps(found))
"""
    scripts = sorted(words[1] for words in COMMANDS)
    # where a script started by its path finds what lies beside it
    beside = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), "benchmarks"])}
    done = subprocess.run(
        [sys.executable, "-c", program, *scripts],
        cwd=ROOT, env=beside, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[1])
def test_help_knows_the_options(words: list[str], helps: dict[str, str]) -> None:
    options = set(re.findall(r"--[a-z][a-z-]*", helps[words[1]]))
    assert {word for word in words if word.startswith("--")} <= options
