"""`frugal preview --html FILE`: the same view as one self-contained page, every token with its id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from frugal.data.preview import PreviewData, ShownRow, histogram
from frugal.files import write_text
from frugal.web.pages import render


def write_preview_html(preview: PreviewData, path: Path) -> None:
    """Write the page: UTF-8, no script, nothing loaded from elsewhere."""
    report, lengths = preview.report, histogram(preview.lengths)
    most = max((rows for _, _, rows in lengths), default=1) or 1
    figures = list(dict.fromkeys(name for counts in report.figures.values() for name in counts))
    page = render(
        "preview.html",
        preview=preview,
        rows=[(row, _spans(row)) for row in preview.rows],
        lengths=[(f"{begin:,}-{end:,}", [(rows / most, f"{rows:,}", "train")]) for begin, end, rows in lengths],
        sources=[
            [one.part, one.path, one.format, one.rows_read, one.rows_good, one.rows_held_out, f"{one.weight:g}",
             one.rows_taken]
            for one in report.sources
        ],
        drops=[[one.part, one.reason, one.first, one.rows, one.tokens] for one in report.drops],
        heads=["part", *(name.replace("_", " ") for name in figures)],
        figures=[[part, *(counts.get(name, "") for name in figures)] for part, counts in report.figures.items()],
    )  # fmt: skip
    write_text(path, page)


def _spans(row: ShownRow) -> list[dict[str, Any]]:
    """Class, title and text of each token that is kept."""
    return [
        {
            "css": " ".join(name for name, on in (("t", token.trained), ("s", token.special)) if on),
            "title": f"id {token.token_id}, {'trained' if token.trained else 'not trained'}",
            # A line break that is a token of its own would be invisible: it gets a sign before it.
            "text": token.text if token.text.strip(" \n") else token.text.replace("\n", "⏎\n"),
        }
        for token in row.tokens[: row.cut_at]
    ]
