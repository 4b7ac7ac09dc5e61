"""The formats of rows: which one a file has, and one raw row into an example.

Keys that change what a row means are used or refused (`meaning.py`), others are left alone and counted. An empty answer
is allowed: it trains only the end of the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from frugal.data.formats.alpaca import fill_alpaca
from frugal.data.formats.meaning import REASONING, SWITCHES, VERDICTS, ignored_keys, refuse_unused, switch_of
from frugal.data.formats.messages import fill_messages
from frugal.data.formats.preference import fill_judged, fill_preference
from frugal.data.formats.prompt_completion import fill_prompt_completion
from frugal.data.formats.text import fill_text
from frugal.data.formats.turns import Roles, key_list, tools_of
from frugal.data.rows import Example, RawRow, RowError
from frugal.errors import DataError

_MOST_IGNORED = 50
"""Names of ignored columns that are counted; rows may have any number of them."""


class RowOff(Exception):
    """The row switches its own training off (`weight: 0`, `train: false`, `loss_weight: 0`)."""


@dataclass(frozen=True)
class Format:
    """How rows of one format are recognised and converted."""

    needs: tuple[str, ...]
    """Keys that every row has."""
    may_have: tuple[str, ...]
    fill: Callable[[dict[str, Any], Example, Roles], None]
    """Fills an example from a row's values; words for roles that were met are added to the last argument."""


FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "output"), ("input", "system", "history", "tools", *REASONING), fill_alpaca),
    "sharegpt": Format(("conversations",), ("tools", "system"), partial(fill_messages, key="conversations")),
    "messages": Format(("messages",), ("tools", "system"), fill_messages),
    "prompt_completion": Format(("prompt", "completion"), ("tools", "system", *REASONING), fill_prompt_completion),
    "text": Format(("text",), (), fill_text),
    "preference": Format(
        ("chosen", "rejected"),
        ("prompt", "conversations", "instruction", "input", "history", "tools", "system"),
        fill_preference,
    ),
    "judged": Format(("prompt", "completion", "label"), ("tools", "system", *REASONING), fill_judged),
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
    return _narrowed([name for name, spec in FORMATS.items() if all(row.get(key) is not None for key in spec.needs)])


def _narrowed(fits: list[str]) -> list[str]:
    if "preference" in fits:
        fits = [name for name in fits if name not in ("sharegpt", "judged")]
    if "judged" in fits:
        fits = [name for name in fits if name != "prompt_completion"]
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
    if not counts:  # keys without values: then each row is told that its value is null
        for row in rows:
            for name in _narrowed([name for name, spec in FORMATS.items() if set(spec.needs) <= row.keys()]):
                counts[name] = counts.get(name, 0) + 1
    if not counts:
        raise DataError(
            f"{source}: the format cannot be told from the keys of the first rows: {seen_keys(rows)}. Formats need:\n"
            f"{format_table()}\n"
            "Say which one it is (`format: prompt_completion`) and name your columns "
            f"(`columns: {_columns_line(rows)}`)."
        )
    best = max(counts.values())
    first = [name for name in FORMATS if counts.get(name) == best]
    if len(first) > 1:
        raise DataError(
            f"{source}: the first rows fit several formats: {', '.join(first)}. They have: {seen_keys(rows)}. "
            f"Say which one is meant, for example `format: {first[0]}`."
        )
    return first[0]


_QUESTIONS = ("prompt", "instruction", "question", "query", "problem")
_ANSWERS = ("completion", "output", "response", "answer", "solution")


def known_columns(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """`columns` for rows of one question and one answer in other words, for example question/answer or Dolly's
    instruction/context/response; empty when rows fit a format as they are, or the words are not clear."""
    if not rows or any(formats_that_fit(row) for row in rows):
        return {}
    for end in ("_messages", "_response"):
        if all(any(row.get(name + end) for row in rows) for name in ("chosen", "rejected")):
            return {name: name + end for name in ("chosen", "rejected")}
    questions, answers = _having(rows, _QUESTIONS), _having(rows, _ANSWERS)
    if len(questions) != 1 or len(answers) != 1:
        return {}
    context = _having(rows, ("input", "context"))
    if len(context) > 1:
        return {}
    if context or questions[0].lower() == "instruction":
        named = {"instruction": questions[0], "output": answers[0], **({"input": context[0]} if context else {})}
    else:
        named = {"prompt": questions[0], "completion": answers[0]}
    return {name: column for name, column in named.items() if name != column}


def _having(rows: Sequence[dict[str, Any]], words: Sequence[str]) -> list[str]:
    """Columns of the rows that are one of ``words``, letter case aside, and hold a text or a list somewhere."""
    seen = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (str, list)))
    return [key for word in words for key in seen if key.lower() == word]


def _columns_line(rows: Sequence[dict[str, Any]]) -> str:
    questions, answers = _having(rows, (*_QUESTIONS, "input", "context")), _having(rows, _ANSWERS)
    prompt = questions[0] if questions else "your_question"
    return f"{{prompt: {prompt}, completion: {answers[0] if answers else 'your_answer'}}}"


def wrong_format_advice(rows: Sequence[dict[str, Any]], format_name: str) -> str | None:
    """What to set instead when not one of the rows has the keys of ``format_name``; None when one has."""
    needs = FORMATS[format_name].needs
    if not rows or any(all(row.get(key) is not None for key in needs) for row in rows):
        return None
    fits = list(dict.fromkeys(name for row in rows for name in formats_that_fit(row)))
    advice = f"format {format_name} needs {', '.join(needs)}; the rows have: {seen_keys(rows)}."
    if fits:
        return f"{advice} They fit format {' or '.join(fits)}: set `format: {fits[0]}`."
    return f"{advice} Name your columns: `columns: {_needed_line(rows, needs)}`. Formats need:\n{format_table()}"


def _needed_line(rows: Sequence[dict[str, Any]], needs: Sequence[str]) -> str:
    if needs not in (("prompt", "completion"), ("instruction", "output")):
        return f"{{{needs[0]}: your_column}}"
    line = _columns_line(rows)
    return line if needs[0] == "prompt" else line.replace("{prompt:", "{instruction:").replace("completion:", "output:")


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


def apply_columns(row: dict[str, Any], columns: dict[str, str], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The row under the format's own names; a mapped or ignored column is not seen under its old name."""
    if ignore:
        row = {key: value for key, value in row.items() if key not in ignore}
    if not columns:
        return row
    renamed = {key: value for key, value in row.items() if key not in columns.values() and key not in columns}
    renamed.update((name, row[column]) for name, column in columns.items() if column in row)
    return renamed


def convert(row: RawRow, format_name: str, roles: Roles, ignored: dict[str, int] | None = None) -> Example:
    """One raw row (own names) as an example.

    Words for roles that were met are added to ``roles``; columns with a value that nobody reads are counted in
    ``ignored``.

    Raises:
        RowError: a needed key is missing, a value is not what the format says, or a key that changes the row's meaning
            is not one of the format's.
        RowOff: the row itself says that it is not to be trained.
    """
    spec = FORMATS[format_name]
    # A missing value that nobody needs (NaN in a table) is an absent one.
    value = {key: one for key, one in row.value.items() if key in spec.needs or one == one}
    used = {*spec.needs, *spec.may_have, *SWITCHES}
    if "tools" in spec.may_have and value.get("tools") in (None, "", "[]", []) and "functions" in value:
        value = {**value, "tools": value["functions"]}  # OpenAI's first name for them
        used.add("functions")
    if "system" in spec.may_have and value.get("system") in (None, "") and "system_prompt" in value:
        value = {**value, "system": value["system_prompt"]}
        used.add("system_prompt")
    if format_name == "preference":
        used.update(VERDICTS)  # the order of the two answers says it already
    refuse_unused(value, used)
    for key in spec.needs:
        if value.get(key) is None:
            missing = "is null" if key in value else "is missing"
            raise RowError(f"`{key}` {missing}", f"the row has: {key_list(value)}")
    if switch_of(value, "a row") is False:
        raise RowOff
    example = Example(kind="messages", source=row.file, line=row.line)
    if "tools" in spec.may_have:
        example.tools = tools_of(value.get("tools"))
    spec.fill(value, example, roles)
    if ignored is not None:
        for key in ignored_keys(row.value, used):
            if key in ignored or len(ignored) < _MOST_IGNORED:
                ignored[key] = ignored.get(key, 0) + 1
    return example
