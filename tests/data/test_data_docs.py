"""docs/data.md says what the code does: formats, roles and file kinds."""

from __future__ import annotations

from pathlib import Path

from frugal.data.formats import FORMATS
from frugal.data.formats.turns import ROLE_ALIASES
from frugal.data.sources.find import SUFFIXES

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_role_word_is_listed() -> None:
    for words in ROLE_ALIASES.values():
        assert f"| {', '.join(words)}" in PAGE


def test_every_format_and_its_keys_are_listed() -> None:
    for name, spec in FORMATS.items():
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{key}`" in line for key in (*spec.needs, *spec.may_have)), name


def test_every_kind_of_file_is_listed() -> None:
    assert all(f"`{suffix}`" in PAGE for suffix in SUFFIXES)
