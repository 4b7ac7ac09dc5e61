"""Show rows as they will be trained, without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from frugal.config import Config, load_config
from frugal.console import safe_console
from frugal.data import PreviewData, preview_rows, render_preview
from frugal.models.positions import positions
from frugal.models.resolve import ResolvedModel, resolve_base
from frugal.models.tokenizer import load_tokenizer, rows_needed
from frugal.web.preview import write_preview_html


def preview(
    config: Config | Mapping[str, object] | str | Path, *, html: str | Path | None = None, rows: int = 5
) -> PreviewData:
    """Show the first ``rows`` rows as they will be trained: trained tokens coloured, counts, lengths, answers' ends.

    Printed, or written to ``html``. Loads the tokenizer, no weights.
    """
    config = load_config(config)
    model = config.model
    base = resolve_base(model.base, model.revision, trust_remote_code=model.trust_remote_code)
    tokenizer = load_tokenizer(base, add_tokens=model.add_tokens, trust_remote_code=model.trust_remote_code)
    settings = base.config()
    table = rows_needed(tokenizer, settings)
    shown = preview_rows(
        config.data, tokenizer, seed=config.train.seed, vocab_size=table, rows=rows, objective=config.objective.name
    )
    shown.notes.extend(_beyond_positions(base, settings, shown))
    if html is not None:
        write_preview_html(shown, Path(html))
    else:
        safe_console().print(render_preview(shown))
    return shown


def _beyond_positions(base: ResolvedModel, settings: Any, shown: PreviewData) -> list[str]:
    """What training would say of rows longer than the model's positions.

    Whether these are learned is seen in the model's structure, which takes seconds to import: asked only when a row is
    longer than config.json says.
    """
    declared = getattr(settings.get_text_config(), "max_position_embeddings", None)
    if not isinstance(declared, int) or shown.lengths.max(initial=0) <= declared:
        return []
    build_meta = import_module("frugal.models.skeleton").build_meta
    limit = positions(settings, build_meta(settings, trust_remote_code=base.trust_remote_code))
    warning = limit.check(shown.lengths, "train") if limit is not None else None
    return [] if warning is None else [warning]
