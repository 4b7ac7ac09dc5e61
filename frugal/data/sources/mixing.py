"""Sources into one list of examples and the report of what was left out.

Mixing: a source's weight says how often each of its rows is seen in an epoch. Whole copies come first, then a part of
the rows for the fraction: 0.5 takes half of them, 2.5 takes each twice and half of them once more. Which rows those
are, and which are held out, depends on the seed, the source's place in the list and the row's place in the source, and
on nothing else: not on the number of processes or on the version of any random generator.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from frugal.config import DataSection, SourceSection
from frugal.data.formats import (
    RowOff,
    apply_columns,
    check_columns,
    convert,
    detect_format,
    known_columns,
    wrong_format_advice,
)
from frugal.data.report import DataReport, SourceCount
from frugal.data.rows import BadRow, Example, RawRow, RowError
from frugal.data.sources.encoding import NOT_UTF8
from frugal.data.sources.read import read_rows
from frugal.errors import DataError

OnBadRow = Literal["error", "drop"]

_LOOK_AT_ROWS = 100
"""Rows that decide on the format."""
_SHOWN_FAULTS = 20
_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")


@dataclass(slots=True)
class _Loaded:
    """A source's good rows, each once."""

    source: SourceSection
    count: SourceCount
    examples: list[Example] = field(default_factory=list)


@dataclass(slots=True)
class _Faults:
    """Faults of all sources, the first ones in words, each once with the number of its rows."""

    shown: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    """(file, fault) -> (`file:line` of the first row, rows)."""
    rows: int = 0
    fatal: bool = False

    def add(self, file: str, line: int, fault: RowError) -> None:
        self.rows += 1
        key = (file, str(fault))
        if key in self.shown or len(self.shown) < _SHOWN_FAULTS:
            first, rows = self.shown.get(key, (f"{file}:{line}", 0))
            self.shown[key] = (first, rows + 1)

    def include(self, other: _Faults) -> None:
        self.rows += other.rows
        self.fatal = self.fatal or other.fatal
        for key, told in other.shown.items():
            if len(self.shown) < _SHOWN_FAULTS:
                self.shown.setdefault(key, told)

    def lines(self) -> str:
        lines = []
        for (_, fault), (first, rows) in self.shown.items():
            lines.append(f"{first}: {fault}" + (f" [{rows:,} rows like this]" if rows > 1 else ""))
        left = self.rows - sum(rows for _, rows in self.shown.values())
        return "\n".join([*lines, f"and {left:,} more"] if left else lines)

    def message(self, rows_read: int) -> str:
        if self.fatal:
            return self.lines()
        head = f"{self.rows:,} of {rows_read:,} rows cannot be used:\n" if self.rows > 1 else ""
        if any(fault.startswith(NOT_UTF8) for _, fault in self.shown):
            return f"{head}{self.lines()}\nConvert the file: leaving these rows out would lose them."
        return f"{head}{self.lines()}\nCorrect them, or set `data.on_bad_row: drop` to leave them out and count them."


def load_examples(
    sources: Sequence[SourceSection],
    *,
    on_bad_row: OnBadRow,
    seed: int,
    part: str = "train",
    report: DataReport | None = None,
) -> tuple[list[Example], DataReport]:
    """All examples of ``sources``, mixed by weight, source after source.

    Args:
        on_bad_row: `error` reads everything and raises once, with every fault; `drop` counts them in the report.
        seed: chooses rows where a weight is a fraction.
        part: name of these rows in the report, `train` or `eval`.
        report: an report to go on with.

    Raises:
        DataError: a source that cannot be read, bad rows under `error`, or a source without one usable row.
    """
    report = report if report is not None else DataReport()
    loaded = _load(sources, on_bad_row, part, report)
    return _mix(loaded, seed), report


def load_train_eval(data: DataSection, *, seed: int) -> tuple[list[Example], list[Example], DataReport]:
    """Training and evaluation examples as the `data` section says.

    `data.eval` wins; otherwise `data.eval_split` of the training rows (a fraction below 1, or a number) is held out,
    before weights multiply rows, so that no copy of a held-out row is trained on.

    Raises:
        DataError: see `load_examples`; or nothing is left to train on.
    """
    report = DataReport()
    loaded = _load(data.train, data.on_bad_row, "train", report)
    held_out: list[Example] = []
    if data.eval:
        held_out = _mix(_load(data.eval, data.on_bad_row, "eval", report), seed)
    elif data.eval_split > 0:
        held_out = _hold_out(loaded, data.eval_split, seed)
    return _mix(loaded, seed), held_out, report


def _load(sources: Sequence[SourceSection], on_bad_row: OnBadRow, part: str, report: DataReport) -> list[_Loaded]:
    faults = _Faults()
    loaded: list[_Loaded] = []
    for source in sources:
        one, found = _load_one(source, on_bad_row, part, report)
        loaded.append(one)
        faults.include(found)
    if faults.fatal or (faults.rows and on_bad_row == "error"):
        raise DataError(faults.message(report.rows_read(part)))
    return loaded


def _load_one(source: SourceSection, on_bad_row: OnBadRow, part: str, report: DataReport) -> tuple[_Loaded, _Faults]:
    rows: Iterator[RawRow | BadRow] = read_rows(source, report)
    if source.max_rows is not None:
        rows = itertools.islice(rows, source.max_rows)
    head = list(itertools.islice(rows, _LOOK_AT_ROWS))
    raw = [row.value for row in head if isinstance(row, RawRow)]
    check_columns(source.columns, raw, source.format, source.path)
    columns = source.columns
    if not columns and source.format == "auto":
        columns = known_columns([apply_columns(row, {}, source.ignore_columns) for row in raw])
        if columns:
            told = ", ".join(f"{name}: {column}" for name, column in columns.items())
            report.note(f"{source.path}: read with `columns: {{{told}}}`")

    def own(row: dict[str, Any]) -> dict[str, Any]:
        return apply_columns(row, columns, source.ignore_columns)

    sample = [own(row) for row in raw]
    count = SourceCount(source.path, part, "", source.weight)
    report.sources.append(count)
    loaded = _Loaded(source, count)
    advice = None
    if source.format != "auto":
        count.format = source.format
        advice = wrong_format_advice(sample, source.format)
        if advice is not None and on_bad_row == "error":
            raise DataError(f"{source.path}: {advice}")
    elif sample:
        count.format = detect_format(sample, source.path)
    placeholders: dict[str, tuple[int, str]] = {}
    faults = _Faults()
    off = 0
    for row in itertools.chain(head, rows):
        count.rows_read += 1
        fault = row.fault if isinstance(row, BadRow) else None
        if isinstance(row, RawRow):
            try:
                if not count.format:  # the first rows were all unreadable: the first good one decides
                    count.format = detect_format([own(row.value)], source.path)
                renamed = RawRow(own(row.value), row.file, row.line)
                example = convert(renamed, count.format, count.roles, count.ignored)
            except RowOff:
                off += 1
                report.drop("the row switches its own training off", f"{row.file}:{row.line}", part=part)
            except RowError as found:
                fault = found
            else:
                loaded.examples.append(example)
                _see_placeholders(example, placeholders)
        if fault is None:
            continue
        faults.add(row.file, row.line, fault)
        faults.fatal = faults.fatal or (isinstance(row, BadRow) and row.fatal)
        if on_bad_row == "drop":
            report.drop(fault.reason, f"{row.file}:{row.line}", part=part, detail=fault.detail)
    count.rows_good = len(loaded.examples)
    if count.rows_read != count.rows_good + faults.rows + off:
        raise DataError(f"{source.path}: rows were lost while reading. This is a fault of frugal; please report it.")
    if count.ignored:
        told = ", ".join(f"{name} ({rows:,})" for name, rows in count.ignored.items())
        report.note(f"columns of {source.path} that are not used (rows): {told}")
    for name, (times, first) in placeholders.items():
        plural = "row contains" if times == 1 else "rows contain"
        report.note(f"{times} {plural} {{{{{name}}}}} (first: {first}): fill it in before training")
    if not loaded.examples and on_bad_row == "drop" and faults.rows and not faults.fatal:
        more = f"\n{advice}" if advice else ""
        raise DataError(f"{source.path}: none of {faults.rows:,} rows can be used.\n{faults.lines()}{more}")
    return loaded, faults


def _see_placeholders(example: Example, found: dict[str, tuple[int, str]]) -> None:
    """Count rows by the names of their unfilled `{{name}}`; at most 10 names, because Jinja code is text too."""
    turns = [*example.messages, *example.chosen, *example.rejected]
    texts = [example.prompt, example.completion, *(turn.content or "" for turn in turns)]
    if example.kind == "text" or not any("{{" in text for text in texts):
        return
    names = dict.fromkeys(name for text in texts if "{{" in text for name in _PLACEHOLDER.findall(text))
    for name in names:
        if name in found or len(found) < 10:
            times, first = found.get(name, (0, f"{example.source}:{example.line}"))
            found[name] = (times + 1, first)


def _hold_out(loaded: list[_Loaded], eval_split: float, seed: int) -> list[Example]:
    """Move a part of the rows, drawn over all sources alike, out of ``loaded``; in the order of the sources.

    Copies of a row go together, so that none is on both sides.
    """
    total = sum(len(part.examples) for part in loaded)
    wanted = int(eval_split) if eval_split >= 1 else max(1, round(total * eval_split))
    if wanted >= total:
        raise DataError(
            f"data.eval_split: {eval_split:g} holds out {wanted:,} of {total:,} rows, which leaves none to train on."
        )
    groups: dict[bytes, list[tuple[int, int]]] = {}
    for index, part in enumerate(loaded):
        for row, example in enumerate(part.examples):
            groups.setdefault(content_key(example), []).append((index, row))
    if len(groups) == 1:
        raise DataError(
            f"data.eval_split: all {total:,} rows are the same; there is nothing to hold out and to train on."
        )
    drawn = _draw_groups(groups, wanted, seed)
    held_out: list[Example] = []
    for index, part in enumerate(loaded):
        kept: list[Example] = []
        for row, example in enumerate(part.examples):
            (held_out if (index, row) in drawn else kept).append(example)
        part.count.rows_held_out = len(part.examples) - len(kept)
        part.examples = kept
    return held_out


def _mix(loaded: list[_Loaded], seed: int) -> list[Example]:
    """Rows of all sources, repeated or thinned out by weight. A weight never thins a source out to nothing."""
    mixed: list[Example] = []
    for index, part in enumerate(loaded):
        rows = len(part.examples)
        copies, fraction = divmod(part.source.weight, 1.0)
        taken = part.examples * int(copies)
        wanted = round(rows * fraction)
        if not taken and rows:
            wanted = max(1, wanted)
        if wanted:
            drawn = _draw([(index, row) for row in range(rows)], wanted, seed, "weight")
            taken += [part.examples[row] for _, row in sorted(drawn)]
        part.count.rows_taken = len(taken)
        mixed += taken
    return mixed


def _draw_groups(groups: dict[bytes, list[tuple[int, int]]], wanted: int, seed: int) -> set[tuple[int, int]]:
    """Places of whole groups, in the order of their hash with the seed, as many as fit; at least one."""

    def key(content: bytes) -> bytes:
        return hashlib.blake2b(f"held out/{seed}/".encode() + content, digest_size=8).digest()

    order = sorted(groups, key=lambda content: (key(content), content))
    drawn: set[tuple[int, int]] = set()
    for content in order:
        if len(drawn) + len(groups[content]) <= wanted:
            drawn.update(groups[content])
    return drawn or set(groups[min(order, key=lambda content: len(groups[content]))])


def _draw(places: list[tuple[int, int]], wanted: int, seed: int, purpose: str) -> list[tuple[int, int]]:
    """``wanted`` of the (source, row) places: those whose hash with the seed is smallest, the same on every machine."""

    def key(place: tuple[int, int]) -> bytes:
        return hashlib.blake2b(f"{purpose}/{seed}/{place[0]}/{place[1]}".encode(), digest_size=8).digest()

    return sorted(places, key=lambda place: (key(place), place))[:wanted]


def content_key(example: Example) -> bytes:
    """Digest of what a row says, wherever it comes from."""
    return hashlib.blake2b(example.content(), digest_size=16).digest()


def keep_apart(train: Sequence[Example], held_out: Sequence[Example], report: DataReport) -> list[Example]:
    """The training examples without those whose content is held out; counted in the report."""
    if not held_out:
        return list(train)
    keys = {content_key(example) for example in held_out}
    kept: list[Example] = []
    for example in train:
        if content_key(example) in keys:
            report.drop("the same row is held out", f"{example.source}:{example.line}")
        else:
            kept.append(example)
    return kept
