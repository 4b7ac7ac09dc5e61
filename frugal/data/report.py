"""The report of a data set: rows and tokens in, dropped (why, how many, first line), out.

One object is filled by every step, from reading to packing, and shown at the end. Nothing is left out of training
without a line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_SHORT = {
    "rows_out": "rows",
    "packed_rows": "packed rows",
    "tokens_out": "tokens",
    "tokens_trained": "trained",
    "rows_truncated": "rows truncated",
}
"""Figures of the short form, and what they are called there."""


@dataclass(slots=True)
class SourceCount:
    """Rows of one source, as far as reading and mixing go."""

    path: str
    """As the user wrote it."""
    part: str
    """`train` or `eval`."""
    format: str
    """The format its rows were read as; empty when no row could be looked at."""
    weight: float = 1.0
    roles: dict[str, str] = field(default_factory=dict)
    """Words for roles in the file and the role each became."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Columns that nobody reads, and rows that have a value there."""
    rows_read: int = 0
    """Rows found, blank lines not counted."""
    rows_good: int = 0
    """Rows that became examples."""
    rows_held_out: int = 0
    """Good rows moved to the held-out part."""
    rows_taken: int = 0
    """Rows after the weight: 10 good rows with weight 2 are 20."""


@dataclass(slots=True)
class Drop:
    """Rows left out for one reason."""

    part: str
    reason: str
    rows: int
    first: str
    """`file:line` of the first one."""
    detail: str = ""
    """What was wrong with the first one, when that says more than the reason."""
    tokens: int = 0
    """Tokens that went with them, where they were counted already."""


@dataclass(slots=True)
class DataReport:
    """What came in, what was left out and why, what goes to training."""

    sources: list[SourceCount] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences that need the user's eye but stop nothing."""
    figures: dict[str, dict[str, int]] = field(default_factory=dict)
    """part -> name -> count, in the order given: `tokens`, `tokens_trained`, `rows_out`, `packed_rows`, ..."""

    def drop(
        self, reason: str, where: str, *, part: str = "train", rows: int = 1, tokens: int = 0, detail: str = ""
    ) -> None:
        """Count ``rows`` left out for ``reason``; ``where`` is `file:line` and kept for the first call of a reason."""
        for known in self.drops:
            if known.part == part and known.reason == reason:
                known.rows += rows
                known.tokens += tokens
                return
        self.drops.append(Drop(part, reason, rows, where, detail, tokens))

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def set(self, part: str, **figures: int) -> None:
        """Set counts of a part, for example ``set("train", rows_out=90, tokens=12345)``."""
        self.figures.setdefault(part, {}).update(figures)

    def add(self, part: str, **figures: int) -> None:
        """Add to counts of a part; a new one starts at 0."""
        counts = self.figures.setdefault(part, {})
        for name, value in figures.items():
            counts[name] = counts.get(name, 0) + value

    def rows_read(self, part: str = "train") -> int:
        """Rows found in all sources of a part."""
        return sum(source.rows_read for source in self.sources if source.part == part)

    def rows_dropped(self, part: str = "train") -> int:
        """Rows left out of a part, for any reason."""
        return sum(drop.rows for drop in self.drops if drop.part == part)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, keys in a fixed order."""
        return {
            "sources": [asdict(source) for source in self.sources],
            "drops": [asdict(drop) for drop in self.drops],
            "notes": list(self.notes),
            "figures": {part: dict(counts) for part, counts in self.figures.items()},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DataReport:
        """The report that ``to_json`` wrote."""
        return cls(
            sources=[SourceCount(**source) for source in value["sources"]],
            drops=[Drop(**drop) for drop in value["drops"]],
            notes=list(value["notes"]),
            figures={part: dict(counts) for part, counts in value["figures"].items()},
        )

    def lines(self) -> list[str]:
        """The report in a few plain lines, for a run's screen and log file; the tables say more."""
        lines: list[str] = []
        for part in dict.fromkeys([*(source.part for source in self.sources), *self.figures]):
            mine = [source for source in self.sources if source.part == part]
            counts = self.figures.get(part, {})
            told = [f"{source.rows_read:,} rows of {source.path} ({source.format or '?'})" for source in mine]
            held_out = sum(source.rows_held_out for source in mine)
            told += [f"{held_out:,} held out"] if held_out else []
            out = [f"{counts[name]:,} {words}" for name, words in _SHORT.items() if name in counts]
            lines.append(f"{part}: {', '.join(told)}{' -> ' if told else ''}{', '.join(out)}")
        for drop in self.drops:
            detail = f" ({drop.detail})" if drop.detail else ""
            lines.append(f"left out of {drop.part}: {drop.rows:,} rows: {drop.reason}{detail}; first: {drop.first}")
        return lines + [f"note: {note}" for note in self.notes]

    def __rich__(self) -> RenderableType:
        """Tables for the terminal; texts are shown as they are, never read as rich markup."""
        return Group(*self._renderables())

    def _renderables(self) -> Iterator[RenderableType]:
        sources = _table("Rows", ["part", "source", "format"], ["read", "usable", "held out", "weight", "taken"])
        for source in self.sources:
            _row(
                sources,
                [source.part, source.path, source.format or "?"],
                [source.rows_read, source.rows_good, source.rows_held_out, f"{source.weight:g}", source.rows_taken],
            )
        yield sources
        if self.drops:
            drops = _table("Left out", ["part", "reason", "first"], ["rows", "tokens"])
            for drop in self.drops:
                reason = f"{drop.reason} ({drop.detail})" if drop.detail else drop.reason
                _row(drops, [drop.part, reason, drop.first], [drop.rows, drop.tokens or ""])
            yield drops
        if self.figures:
            names = list(dict.fromkeys(name for counts in self.figures.values() for name in counts))
            figures = _table("Out", ["part"], [name.replace("_", " ") for name in names])
            for part, counts in self.figures.items():
                _row(figures, [part], [counts.get(name, "") for name in names])
            yield figures
        for source in self.sources:
            renamed = [f"{word} -> {role}" for word, role in source.roles.items() if word != role]
            if renamed:
                yield Text(f"roles in {source.path}: {', '.join(renamed)}")
        for note in self.notes:
            yield Text(f"note: {note}")


def _table(title: str, texts: list[str], numbers: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _row(table: Table, texts: list[str], numbers: list[int | str]) -> None:
    shown = [f"{value:,}" if isinstance(value, int) else value for value in numbers]
    table.add_row(*(Text(text) for text in [*texts, *shown]))
