"""The documentation says what is true: its YAML loads, its commands exist, its links lead somewhere."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from frugal.cli.main import app
from frugal.config import load_config
from frugal.config.docs import config_page
from frugal.config.shipped import shipped_configs
from frugal.config.yaml import parse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = ("configs", "schema", "fetch --list")


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), text)
        for page in PAGES
        for found, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page, text in blocks("bash"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append((page, words))
    return found


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml_blocks_load(page: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "block.yaml"
    if text.startswith("# fragment"):
        rest = {"model": {"base": "m"}, "data": {"train": "rows.jsonl"}, "output": {"dir": "out"}}
        tree = parse(text).tree
        load_config({key: {**rest.get(key, {}), **tree.get(key, {})} for key in {**rest, **tree}})
    else:
        path.write_text(text, encoding="utf-8")
        load_config(path)


@pytest.mark.parametrize("text", [text for _, text in blocks("json")])
def test_json_blocks_are_json(text: str) -> None:
    for line in text.splitlines():
        json.loads(line)


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_blocks_use_names_that_exist(page: str, text: str) -> None:
    import frugal

    compile(text, page, "exec")
    for name in re.findall(r"\bfrugal\.(\w+)", text):
        assert name in frugal.__all__, f"{page}: frugal.{name}"


@pytest.mark.parametrize(("page", "words"), commands())
def test_commands_exist(page: str, words: list[str]) -> None:
    if words[0] in ("accelerate", "torchrun"):
        for option, value in itertools.pairwise(words):
            assert option != "--config_file" or (ROOT / value).exists(), f"{page}: {value}"
        assert "-m" in words, f"{page}: {words}"
        words = words[words.index("-m") + 1 :]
        assert words[0] == "frugal", f"{page}: {words}"
    if words[0] == "make":
        rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert all(word in rules for word in words[1:] if "=" not in word), f"{page}: {words}"
    elif words[0] == "frugal":
        command = typer.main.get_command(app)
        rest = words[1:]
        while rest and hasattr(command, "commands"):
            assert rest[0] in command.commands, f"{page}: {words}"
            command = command.commands[rest.pop(0)]
        options = {text for parameter in command.params for text in parameter.opts}
        assert all(word in options for word in rest if word.startswith("--")), f"{page}: {words}"
    else:
        assert words[0] in ("source", "pip", "python"), f"{page}: {words}"


def test_quick_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in one folder: `configs copy`, then `train --dry-run`."""
    monkeypatch.chdir(tmp_path)
    ran = 0
    for _, words in commands():
        rest = " ".join(words[1:])
        if words[0] == "frugal" and (rest.startswith(QUICK) or "--dry-run" in rest):
            if "--dry-run" in rest and not (tmp_path / words[2]).exists():
                continue
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (words, done.output)
            ran += 1
    assert ran >= 6


def test_config_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_page(), "run: make docs"


def test_the_readmes_message_is_what_is_printed(tmp_path: Path) -> None:
    text = (
        "model:\n  base: m\n\n  load_in_4bit: true\ndata:\n  train: r\noutput: {dir: o}\ntrain:\n"
        "  micro_batch_size: 2\n  learning_rate: 2e-4x\n"
    )
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "frugal", "train", "mine.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    (shown,) = [text for page, text in blocks("text") if "mine.yaml" in text]
    assert shown == "$ frugal train mine.yaml\n" + done.stderr


@pytest.mark.parametrize("name", shipped_configs())
def test_ready_configurations_load(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    config = load_config(path)
    assert config.output.dir == f"runs/{name}"
    assert path.read_text(encoding="utf-8").startswith("# "), "the first line says what it is (`frugal configs list`)"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"
