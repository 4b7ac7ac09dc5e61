"""`frugal preview --html FILE`: the same view as one self-contained page, light and dark, every token with its id."""

from __future__ import annotations

import html
from pathlib import Path

from frugal.data.preview import PreviewData, ShownRow, histogram
from frugal.data.report import DataReport
from frugal.files import write_text

_STYLE = """
:root { color-scheme: light dark; --back: #fbfaf7; --card: #ffffff; --ink: #23262b; --soft: #6b717b; --line: #e3e1da;
  --trained: #0b5d3b; --trained-back: #d8f3e3; --bar: #3a8f68; --warn: #8a4b00; --warn-back: #fff1d6;
  --bad: #a1231c; --hover: #ffe08a; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --card: #1d2026; --ink: #dfe2e7; --soft: #949ba6;
  --line: #31353d; --trained: #8ce8b8; --trained-back: #133a2a; --bar: #4fb286; --warn: #ffcf87; --warn-back: #3a2c12;
  --bad: #ff8f86; --hover: #6b5714; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .75rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); }
.line { display: inline-block; margin: 1rem 0 .25rem; padding: .45rem .8rem; border-radius: .5rem; font-weight: 600;
  background: var(--trained-back); color: var(--trained); }
.line.no { background: var(--warn-back); color: var(--bad); }
.warn { margin: .5rem 0; padding: .6rem .8rem; border-radius: .5rem; background: var(--warn-back); color: var(--warn); }
.row { margin: 0 0 1rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card);
  overflow: hidden; }
.row header { display: flex; flex-wrap: wrap; justify-content: space-between; gap: .25rem 1rem; padding: .55rem .9rem;
  border-bottom: 1px solid var(--line); font-size: .85rem; color: var(--soft); overflow-wrap: anywhere; }
.row pre { margin: 0; padding: .8rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
  font: .86rem/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.row pre span { border-radius: .1rem; }
.row pre .t { border-radius: 0; }
.row pre span:hover { background: var(--hover); outline: 1px solid var(--soft); }
.t { background: var(--trained-back); color: var(--trained); box-shadow: inset 0 -1px var(--trained); }
.s { opacity: .75; font-style: italic; }
.u { border: 1px solid var(--line); }
.cut { color: var(--bad); }
.legend span { padding: .1rem .4rem; border-radius: .25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: 0 0 1rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bars { display: grid; grid-template-columns: auto 1fr auto; gap: .2rem .75rem; align-items: center;
  font-size: .88rem; }
.bars i { display: block; height: .95rem; border-radius: .2rem; background: var(--bar); }
"""


def write_preview_html(preview: PreviewData, path: Path) -> None:
    """Write the page: UTF-8, no script, nothing loaded from elsewhere."""
    write_text(path, preview_html(preview))


def preview_html(preview: PreviewData) -> str:
    """The page as text."""
    report = preview.report
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>frugal preview</title><style>{_STYLE}</style></head><body>",
        "<h1>What the model will see</h1>",
        '<p class="soft">Rows as they are tokenised for training. Point at a token to see its id.</p>',
        f'<p class="line{"" if report.end_trained else " no"}">{_text(report.line)}</p>',
    ]
    if report.stop_tokens:
        parts.append(f'<p class="soft">Generation stops at {_text(", ".join(report.stop_tokens))}.</p>')
    parts += [f'<p class="warn">{_text(warning)}</p>' for warning in [*report.warnings, *preview.notes]]
    parts.append(
        '<h2>Rows</h2><p class="legend soft"><span class="t">trained</span> <span class="u">not trained</span></p>'
    )
    parts += [_row(row) for row in preview.rows]
    parts.append(_bars(preview))
    parts.append(_account(preview.report))
    return "\n".join(parts) + "\n</body></html>\n"


def _text(value: object) -> str:
    return html.escape(str(value))


def _row(row: ShownRow) -> str:
    spans: list[str] = []
    for token in row.tokens[: row.cut_at]:
        kind = " ".join(name for name, on in (("t", token.trained), ("s", token.special)) if on)
        title = f"id {token.token_id}, {'trained' if token.trained else 'not trained'}"
        # A line break that is a token of its own would be invisible: it gets a sign before it.
        shown = _text(token.text).replace("\n", "⏎\n") if not token.text.strip(" \n") else _text(token.text)
        spans.append(f'<span{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} title="{title}">{shown}</span>')
    cut = len(row.tokens) - row.cut_at
    if cut:
        spans.append(f'<span class="cut">\n... {cut:,} more tokens are beyond data.max_length</span>')
    if row.fault:
        spans.append(f'<span class="cut">left out: {_text(row.fault)}</span>')
    return (
        f'<article class="row"><header><span>{_text(row.title)}</span>'
        f"<span>{row.cut_at:,} tokens, {row.trained:,} trained</span></header><pre>{''.join(spans)}</pre></article>"
    )


def _bars(preview: PreviewData) -> str:
    classes = histogram(preview.lengths)
    most = max((rows for _, _, rows in classes), default=1) or 1
    bars = "".join(
        f'<span class="n">{begin:,}-{end:,}</span><i style="width:{100 * rows / most:.1f}%"></i>'
        f'<span class="n">{rows:,}</span>'
        for begin, end, rows in classes
    )
    head = f'<h2>Lengths in tokens</h2><p class="soft">At most {preview.max_length:,}.</p>'
    return f'{head}<div class="bars">{bars}</div>'


def _account(report: DataReport) -> str:
    parts = ["<h2>DataReport</h2>"]
    parts.append(
        _table(
            ["part", "source", "format", "read", "usable", "held out", "weight", "taken"],
            [
                [
                    source.part,
                    source.path,
                    source.format,
                    source.rows_read,
                    source.rows_good,
                    source.rows_held_out,
                    f"{source.weight:g}",
                    source.rows_taken,
                ]
                for source in report.sources
            ],
        )
    )
    if report.drops:
        rows = [[drop.part, drop.reason, drop.first, drop.rows, drop.tokens] for drop in report.drops]
        parts.append(_table(["part", "left out because", "first", "rows", "tokens"], rows))
    if report.figures:
        names = list(dict.fromkeys(name for counts in report.figures.values() for name in counts))
        rows = [[part, *(counts.get(name, "") for name in names)] for part, counts in report.figures.items()]
        parts.append(_table(["part", *(name.replace("_", " ") for name in names)], rows))
    parts += [f'<p class="soft">{_text(note)}</p>' for note in report.notes]
    return "\n".join(parts)


def _table(heads: list[str], rows: list[list[object]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td class="n">{value:,}</td>'
    return f"<td>{_text(value)}</td>"
