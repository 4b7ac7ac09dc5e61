"""`frugal preview`: rows as the model will see them, trained tokens marked, with counts, lengths and the pre-flight
line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from frugal.config import DataSection
from frugal.data.answer_ends import TemplateReport
from frugal.data.dataset import where
from frugal.data.encode import EncodedRow, RowEncoder
from frugal.data.pairs import EncodedPair, encode_pairs
from frugal.data.pipeline import TRAIN_JUDGED, TRAIN_PAIRS, build_from, make_encoder
from frugal.data.report import DataReport
from frugal.data.rows import Example
from frugal.data.sources.mixing import load_train_eval


@dataclass(slots=True)
class ShownToken:
    """One token of a shown row."""

    text: str
    """The characters it covers; the token's own name where it covers none."""
    token_id: int
    trained: bool
    special: bool
    """True for tokens that stand for no text of the row, like an end token put behind it."""


@dataclass(slots=True)
class ShownRow:
    """One row of the preview."""

    title: str
    tokens: list[ShownToken]
    cut_at: int
    """Tokens that fit `max_length`; the rest is shown as cut."""
    fault: str = ""

    @property
    def trained(self) -> int:
        """Trained tokens within `max_length`."""
        return sum(token.trained for token in self.tokens[: self.cut_at])


@dataclass(slots=True)
class PreviewData:
    """What a preview shows."""

    rows: list[ShownRow]
    lengths: np.ndarray
    """int64: tokens of each training row before packing, of a pair both documents'."""
    report: DataReport
    template_report: TemplateReport
    max_length: int
    notes: list[str] = field(default_factory=list)


def preview_rows(
    data: DataSection,
    tokenizer: Any,
    *,
    seed: int,
    vocab_size: int | None = None,
    rows: int = 5,
    cache_dir: Path | None = None,
    zero_rows: Sequence[int] = (),
    objective: str = "sft",
) -> PreviewData:
    """Prepare all data as training would, and the first ``rows`` rows for showing.

    ``vocab_size``: rows of the embedding table, to refuse ids outside of it; None: not checked.
    Preference rows are shown as pairs, chosen and rejected, also with ``objective`` sft, which does not train them;
    a note says so then. Raises what `build` raises.
    """
    train, held_out, report = load_train_eval(data, seed=seed)
    pairs = bool(train) and all(example.kind == "preference" for example in [*train, *held_out])
    notes = []
    judged = pairs and train[0].good is not None
    if pairs and objective == "sft":
        objective = "kto" if judged else "dpo"
        way = TRAIN_JUDGED if judged else TRAIN_PAIRS
        notes.append(f"objective.name is sft, which does not train preference rows. {way}")
    clock = datetime.now()
    prepared = build_from(
        train,
        held_out,
        report,
        data,
        tokenizer,
        vocab_size=vocab_size if vocab_size is not None else sys.maxsize,
        cache_dir=cache_dir,
        zero_rows=zero_rows,
        clock=clock,
        objective=objective,
    )
    row_encoder = make_encoder(data, tokenizer, train, DataReport(sources=report.sources), keep_text=True, clock=clock)
    head = _spread(train, rows)
    if pairs:
        shown = [
            _shown(f"{where(example)} {name}", row, row_encoder, data.max_length, pair.fault)
            for example, pair in zip(head, encode_pairs(row_encoder, head, data), strict=True)
            for name, row in _named(example, pair)
        ]
        lengths = prepared.train.document_lengths
        return PreviewData(shown, lengths, prepared.report, prepared.template_report, data.max_length, notes)
    shown = [
        _shown(where(example), row, row_encoder, data.max_length if example.kind != "text" else len(row.ids))
        for example, row in zip(head, row_encoder.encode(head), strict=True)
    ]
    lengths = np.diff(prepared.train.doc_starts)
    return PreviewData(shown, lengths, prepared.report, prepared.template_report, data.max_length)


def _named(example: Example, pair: EncodedPair) -> list[tuple[str, EncodedRow]]:
    if example.good is not None:
        return [("good" if example.good else "bad", pair.chosen)]
    return [("chosen", pair.chosen), ("rejected", pair.rejected)]


def _spread(examples: Sequence[Example], rows: int) -> list[Example]:
    """The first rows of every source in turn, so that each source is seen; in the order of the data."""
    by_source: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        by_source.setdefault(example.source, []).append(index)
    chosen: list[int] = []
    for turn in range(rows):
        chosen += [places[turn] for places in by_source.values() if turn < len(places)]
    return [examples[index] for index in sorted(chosen[:rows])]


def _shown(title: str, row: EncodedRow, row_encoder: RowEncoder, max_length: int, fault: str = "") -> ShownRow:
    tokens: list[ShownToken] = []
    if row.starts is not None and row.ends is not None:
        reached = 0
        for token_id, trained, start, end in zip(
            row.ids.tolist(), row.trained.tolist(), row.starts.tolist(), row.ends.tolist(), strict=True
        ):
            begin = max(start, reached)  # tokens of one character in several bytes: the first one shows it
            text = row.text[begin:end]
            reached = max(reached, end)
            special = start == end
            tokens.append(
                ShownToken(row_encoder.encoder.token(token_id) if special else text, token_id, trained, special)
            )
    return ShownRow(title, tokens, min(len(tokens), max_length), row.fault or fault)


def render_preview(preview: PreviewData) -> RenderableType:
    """A preview for `console.print`. Trained tokens are coloured, or stand between ⟦ and ⟧ where there are no
    colours."""
    return _View(preview)


@dataclass(slots=True)
class _View:
    """Decides on colours when it is printed."""

    preview: PreviewData

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        preview = self.preview
        coloured = console.is_terminal and not console.no_color
        for row in preview.rows:
            yield _panel(row, coloured)
        for note in preview.notes:
            yield Text(note)
        legend = Text("trained", "bold green") if coloured else Text("⟦trained⟧")
        yield Text.assemble("Text that is ", legend, " is learned; the rest is only read.")
        yield histogram_table(preview.lengths, preview.max_length)
        yield preview.report
        yield Text(preview.template_report.line, "bold" if preview.template_report.end_trained else "bold red")
        if preview.template_report.stop_tokens:
            yield Text(f"generation stops at {', '.join(preview.template_report.stop_tokens)}")
        for warning in preview.template_report.warnings:
            yield Text(f"warning: {warning}", "yellow")


def _panel(row: ShownRow, coloured: bool) -> Panel:
    body = Text(overflow="fold")
    if row.fault:
        body.append(f"left out: {row.fault}", "red")
    inside = False
    pieces: list[tuple[str, str]] = []
    for token in row.tokens[: row.cut_at]:
        if not coloured and token.trained != inside:
            pieces.append(("⟦" if token.trained else "⟧", ""))
        inside = token.trained
        style = ("bold green" if token.trained else "dim" if token.special else "") if coloured else ""
        pieces.append((_visible(token.text), style))
    for style, group in itertools.groupby(pieces, key=lambda piece: piece[1]):
        body.append("".join(text for text, _ in group), style)
    if inside and not coloured:
        body.append("⟧")
    cut = len(row.tokens) - row.cut_at
    if cut:
        body.append(f"\n... {cut:,} more tokens are beyond data.max_length", "red")
    counts = f"{row.cut_at:,} tokens, {row.trained:,} trained"
    return Panel(body, title=Text(row.title), title_align="left", subtitle=counts, subtitle_align="right")


def _visible(text: str) -> str:
    """Text without characters that would move the cursor or colour the terminal."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def histogram(lengths: np.ndarray, bars: int = 10) -> list[tuple[int, int, int]]:
    """(from, to, rows) of up to ``bars`` equal classes between the shortest and the longest row."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1, -(-(high - low + 1) // bars))
    classes = [(begin, min(begin + step - 1, high)) for begin in range(low, high + 1, step)]
    return [(begin, end, int(np.sum((lengths >= begin) & (lengths <= end)))) for begin, end in classes]


def histogram_table(lengths: np.ndarray, max_length: int) -> Table:
    """The lengths as a table of bars."""
    classes = histogram(lengths)
    most = max((rows for _, _, rows in classes), default=1)
    title = "Lengths"
    if len(lengths):
        title = f"Lengths: median {int(np.median(lengths)):,}, longest {int(lengths.max()):,} of {max_length:,} tokens"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    for begin, end, rows in classes:
        table.add_row(f"{begin:,}-{end:,}", "█" * -(-40 * rows // most) if rows else "", f"{rows:,}")
    return table
