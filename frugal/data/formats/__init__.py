"""The formats of rows: which one a file has, and one raw row into an example.

Other keys are left alone. An empty answer is allowed: it trains only the end of the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from frugal.data.formats.alpaca import fill_alpaca
from frugal.data.formats.messages import fill_messages
from frugal.data.formats.preference import fill_preference
from frugal.data.formats.prompt_completion import fill_prompt_completion
from frugal.data.formats.text import fill_text
from frugal.data.formats.turns import Roles, key_list, tools_of
from frugal.data.rows import Example, RawRow, RowError
from frugal.errors import DataError


@dataclass(frozen=True)
class Format:
    """How rows of one format are recognised and converted."""

    needs: tuple[str, ...]
    """Keys that every row has."""
    may_have: tuple[str, ...]
    fill: Callable[[dict[str, Any], Example, Roles], None]
    """Fills an example from a row's values; words for roles that were met are added to the last argument."""


FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "output"), ("input", "system", "history"), fill_alpaca),
    "sharegpt": Format(("conversations",), ("tools", "system"), partial(fill_messages, key="conversations")),
    "messages": Format(("messages",), ("tools", "system"), fill_messages),
    "prompt_completion": Format(("prompt", "completion"), ("tools",), fill_prompt_completion),
    "text": Format(("text",), (), fill_text),
    "preference": Format(
        ("chosen", "rejected"),
        ("prompt", "conversations", "instruction", "input", "tools", "system"),
        fill_preference,
    ),
}
"""A new format is a file beside this one, a row here, and its name in `config.models.SourceSection.format`."""


def format_table() -> str:
    """The formats and their keys as text, one a line."""
    lines = []
    for name, spec in FORMATS.items():
        extra = f" (may have {', '.join(spec.may_have)})" if spec.may_have else ""
        lines.append(f"  {name}: {', '.join(spec.needs)}{extra}")
    return "\n".join(lines)


def formats_that_fit(row: dict[str, Any]) -> list[str]:
    """Formats whose needed keys a row has, without those that a wider one covers.

    `text` beside another format is the same row rendered, so it yields; `conversations` beside chosen and rejected is
    their prompt.
    """
    fits = [name for name, spec in FORMATS.items() if all(row.get(key) is not None for key in spec.needs)]
    if "preference" in fits:
        fits = [name for name in fits if name != "sharegpt"]
    return [name for name in fits if name != "text"] or fits


def detect_format(rows: Sequence[dict[str, Any]], source: str) -> str:
    """The format that most of the rows fit.

    Raises:
        DataError: none fits, or two fit equally many; the message lists what was seen and what each format needs.
    """
    counts: dict[str, int] = {}
    for row in rows:
        for name in formats_that_fit(row):
            counts[name] = counts.get(name, 0) + 1
    if not counts:
        raise DataError(
            f"{source}: the format cannot be told from the keys of the first rows: {seen_keys(rows)}. Formats need:\n"
            f"{format_table()}\n"
            "Say which one it is (`format: prompt_completion`) and name your columns "
            "(`columns: {prompt: your_question, completion: your_answer}`)."
        )
    best = max(counts.values())
    first = [name for name in FORMATS if counts.get(name) == best]
    if len(first) > 1:
        raise DataError(
            f"{source}: the first rows fit several formats: {', '.join(first)}. They have: {seen_keys(rows)}. "
            f"Say which one is meant, for example `format: {first[0]}`."
        )
    return first[0]


def wrong_format_advice(rows: Sequence[dict[str, Any]], format_name: str) -> str | None:
    """What to set instead when not one of the rows has the keys of ``format_name``; None when one has."""
    needs = FORMATS[format_name].needs
    if not rows or any(all(row.get(key) is not None for key in needs) for row in rows):
        return None
    fits = list(dict.fromkeys(name for row in rows for name in formats_that_fit(row)))
    advice = f"format {format_name} needs {', '.join(needs)}; the rows have: {seen_keys(rows)}."
    if fits:
        return f"{advice} They fit format {' or '.join(fits)}: set `format: {fits[0]}`."
    return f"{advice} Name your columns: `columns: {{{needs[0]}: your_column}}`. Formats need:\n{format_table()}"


def seen_keys(rows: Sequence[dict[str, Any]]) -> str:
    """Keys of the rows, in the order first seen."""
    return key_list({key: None for row in rows for key in row}, limit=20)


def check_columns(columns: dict[str, str], rows: Sequence[dict[str, Any]], format_name: str, source: str) -> None:
    """Refuse a `columns` mapping with names that no format has, or columns that no row has.

    Raises:
        DataError: with the names there are.
    """
    specs = list(FORMATS.values()) if format_name == "auto" else [FORMATS[format_name]]
    own = list(dict.fromkeys(name for spec in specs for name in (*spec.needs, *spec.may_have)))
    for name, column in columns.items():
        if name not in own:
            which = "a format" if format_name == "auto" else f"format {format_name}"
            raise DataError(f"{source}: columns: {name!r} is no name of {which}. Names: {', '.join(own)}.")
        if rows and not any(column in row for row in rows):
            raise DataError(f"{source}: columns: {name}: no row has {column!r}. The rows have: {seen_keys(rows)}.")


def apply_columns(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """The row under the format's own names; a mapped column is not seen under its old name."""
    if not columns:
        return row
    renamed = {key: value for key, value in row.items() if key not in columns.values() and key not in columns}
    renamed.update((name, row[column]) for name, column in columns.items() if column in row)
    return renamed


def convert(row: RawRow, format_name: str, roles: Roles) -> Example:
    """One raw row (own names) as an example. Words for roles that were met are added to ``roles``.

    Raises:
        RowError: a needed key is missing, or a value is not what the format says.
    """
    value = row.value
    for key in FORMATS[format_name].needs:
        if value.get(key) is None:
            missing = "is null" if key in value else "is missing"
            raise RowError(f"`{key}` {missing}", f"the row has: {key_list(value)}")
    example = Example(kind="messages", source=row.file, line=row.line)
    if format_name != "text":
        example.tools = tools_of(value.get("tools"))
    FORMATS[format_name].fill(value, example, roles)
    return example
