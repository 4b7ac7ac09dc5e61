"""What became of each module that `frugal.models.replace_modules` looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class SwapRow:
    """One module: what it was, what it became (None: left alone) and why."""

    name: str
    was: str
    became: str | None
    reason: str


@dataclass
class SwapReport:
    """All modules that were candidates, in the order they were looked at."""

    rows: list[SwapRow] = field(default_factory=list)

    def add(self, name: str, old: nn.Module, new: nn.Module | None, reason: str) -> None:
        """Note one decision."""
        self.rows.append(SwapRow(name, type(old).__name__, None if new is None else type(new).__name__, reason))

    def extend(self, other: SwapReport) -> None:
        """Add the decisions of another part of the same model."""
        self.rows.extend(other.rows)

    @property
    def swapped(self) -> list[SwapRow]:
        """Modules that were replaced."""
        return [row for row in self.rows if row.became is not None]

    @property
    def kept(self) -> list[SwapRow]:
        """Modules that stayed, each with its reason."""
        return [row for row in self.rows if row.became is None]

    def groups(self) -> list[tuple[SwapRow, int]]:
        """Rows that differ in layer numbers only, joined: (row with ``*`` for numbers, how many)."""
        counts: dict[SwapRow, int] = {}
        for row in self.rows:
            pattern = SwapRow(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.name), row.was, row.became, row.reason)
            counts[pattern] = counts.get(pattern, 0) + 1
        return list(counts.items())

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values for the manifest."""
        return [
            {"modules": row.name, "count": count, "was": row.was, "became": row.became, "reason": row.reason}
            for row, count in self.groups()
        ]

    def __str__(self) -> str:
        if not self.rows:
            return "no module was a candidate for replacement"
        lines = [
            (f"{count:4d} x {row.name}", f"{row.was} -> {row.became or 'left alone'}", row.reason)
            for row, count in self.groups()
        ]
        first, second = (max(len(line[i]) for line in lines) for i in (0, 1))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in lines)
