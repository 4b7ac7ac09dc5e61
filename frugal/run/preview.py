"""Show rows as they will be trained, without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from frugal.config import Config, load_config
from frugal.console import safe_console
from frugal.data import PreviewData, preview_rows, render_preview
from frugal.models.positions import positions
from frugal.models.skeleton import build_meta
from frugal.models.tokenizer import rows_needed
from frugal.run.steps import open_base, open_tokenizer
from frugal.web.preview import write_preview_html


def preview(
    config: Config | Mapping[str, object] | str | Path, *, html: str | Path | None = None, rows: int = 5
) -> PreviewData:
    """Show the first ``rows`` rows as they will be trained: trained tokens coloured, counts, lengths, answers' ends.

    Printed, or written to ``html``. Loads the tokenizer, no weights.
    """
    config = load_config(config)
    base = open_base(config)
    tokenizer = open_tokenizer(config, base)
    table = rows_needed(tokenizer, base.config())
    shown = preview_rows(config.data, tokenizer, seed=config.train.seed, vocab_size=table, rows=rows)
    limit = positions(base.config(), build_meta(base.config(), trust_remote_code=base.trust_remote_code))
    if limit is not None and (warning := limit.check(shown.lengths, "train")) is not None:
        shown.notes.append(warning)
    if html is not None:
        write_preview_html(shown, Path(html))
    else:
        safe_console().print(render_preview(shown))
    return shown
