"""docs/architecture.md and its picture say what is there; every module and name that any page names exists."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from docs import architecture

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "benchmarks/README.md"]
A_PATH = re.compile(r"(?<![\w/.-])((?:frugal|tests|benchmarks|docs|notebooks)/[\w./-]*\w/?)(?![\w*<{])")
A_NAME = re.compile(r"(?<![\w/.-])(frugal(?:\.[A-Za-z_]\w*)+)(?!\.?[\w/])")
NAMES_OF = re.compile(r"`(frugal/[\w/]+\.py)`\s+\((`[\w.]+`(?:,\s+`[\w.]+`)*)\)")
FILES = (".json", ".toml", ".yaml")


def has(owner: Any, names: list[str]) -> bool:
    """Whether ``owner`` has the attribute; fields of a dataclass that have no default count."""
    for name in names:
        if hasattr(owner, name):
            owner = getattr(owner, name)
        else:
            return name in getattr(owner, "__annotations__", {})
    return True


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # what stands before the last dot is no package
            found = None
        if found is not None:
            return length == len(parts) or has(importlib.import_module(module), parts[length:])
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_and_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = sorted({path for path in A_PATH.findall(text) if not (ROOT / path).exists()})
    names = {name for name in A_NAME.findall(text) if not name.endswith(FILES)}
    missing += sorted(name for name in names if not exists(name))
    for path, listed in NAMES_OF.findall(text):
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        missing += [f"{path}: {name}" for name in re.findall(r"[\w.]+", listed) if not exists(f"{module}.{name}")]
    assert not missing, f"{page.relative_to(ROOT)} names what is not there: {missing}"


@pytest.mark.parametrize(
    "name", ["frugal.nothing", "frugal.training.step.Nothing", "frugal.training.step.OptimizerStep.no"]
)
def test_a_name_that_is_not_there_is_found(name: str) -> None:
    assert A_NAME.findall(f"see `{name}`.") == [name]
    assert not exists(name)


def test_the_walks_name_functions() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert len(NAMES_OF.findall(text)) >= 25


def test_the_picture_is_up_to_date() -> None:
    written = architecture.PICTURE.read_text(encoding="utf-8")
    found = architecture.out_of_date(written, architecture.picture(architecture.read_parts()))
    assert not found, f"run: make docs {found}"


def test_a_new_import_makes_the_picture_outdated() -> None:
    parts = architecture.read_parts()
    before = architecture.picture(parts)
    parts[-1].imports["cli"] += 1
    assert architecture.out_of_date(before, architecture.picture(parts)) == [f"new: {parts[-1].name} imports cli"]


def test_imports_go_down() -> None:
    layer = {part.name: part.layer for part in architecture.read_parts()}
    up = [
        f"{part.name} imports {other}"
        for part in architecture.read_parts()
        for other in part.imports
        if layer[other] <= part.layer
    ]
    assert not up


def test_every_part_says_what_it_is() -> None:
    """By the docstring of its package or module; the picture shows it."""
    assert not [part.name for part in architecture.read_parts() if len(part.about) < 10]


def test_every_module_has_a_docstring() -> None:
    without = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "frugal").rglob("*.py"))
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not without
