"""The distribution is frugal-lora: `frugal` in the registry is another project (B1 of the GPU review)."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# `pip install frugal`, 'frugal[extra]', frugal==1: as a requirement, never as the import
WRONG = re.compile(r"pip3? install (?:[-\w]+ )*['\"]?frugal(?![-\w/])|frugal\[\w+\]|frugal *[=~>]=")
TEXTS = ("*.py", "*.md", "*.yaml", "*.yml", "*.toml", "*.ipynb", "*.jinja", "Makefile")


def test_no_text_names_the_other_project() -> None:
    found = []
    for path in (path for pattern in TEXTS for path in ROOT.rglob(pattern)):
        if path == Path(__file__) or {".venv", ".git", "runs", "build"} & set(path.relative_to(ROOT).parts):
            continue
        found += [f"{path}: {hit[0]}" for hit in WRONG.finditer(path.read_text(encoding="utf-8"))]
    assert found == []
    assert 'name = "frugal-lora"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_pattern_sees_what_it_looks_for() -> None:
    for text in ("pip install frugal", "pip install -q frugal\n", "pip install 'frugal[deepspeed]'", "frugal==0.1"):
        assert WRONG.search(text), text
    assert not WRONG.search("pip install frugal-lora")


@pytest.fixture
def install_cell() -> str:
    book = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
    return "".join(next(cell for cell in book["cells"] if cell["cell_type"] == "code")["source"])


def run_without_frugal(cell: str, folder: Path, monkeypatch: pytest.MonkeyPatch, module: types.ModuleType) -> list[str]:
    """Run the cell where no frugal is found; ``module`` is what pip then installed. Returns pip's arguments."""
    asked: list[list[str]] = []

    def install(words: list[str], **_: Any) -> None:
        asked.append([*words[:-1], Path(words[-1]).read_text(encoding="utf-8")])
        monkeypatch.setitem(sys.modules, "frugal", module)

    find = importlib.util.find_spec
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "frugal" else find(name))
    monkeypatch.setattr(subprocess, "run", install)
    exec(compile(cell, "cell", "exec"), {})
    return asked[0]


def test_the_notebook_installs_this_project(install_cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder the distribution's name, in a checkout the checkout; torch stays as it is."""
    ours = types.ModuleType("frugal")
    vars(ours)["load_config"] = print
    words = run_without_frugal(install_cell, tmp_path / "empty" / "notebooks", monkeypatch, ours)
    assert "frugal-lora" in words
    assert "frugal" not in words
    assert words[-1].startswith("torch==")
    (tmp_path / "checkout" / "frugal").mkdir(parents=True)
    (tmp_path / "checkout" / "frugal" / "__init__.py").touch()
    words = run_without_frugal(install_cell, tmp_path / "checkout" / "notebooks", monkeypatch, ours)
    assert str((tmp_path / "checkout").resolve()) in words


def test_the_notebook_sees_another_project(install_cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("frugal")
    other.__file__ = "site-packages/frugal/__init__.py"
    with pytest.raises(RuntimeError, match=r"another project of that name.*pip install frugal-lora"):
        run_without_frugal(install_cell, tmp_path / "notebooks", monkeypatch, other)
