"""Data: read, render, mask, truncate, pack, cache, batch. Names are imported when they are first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frugal.data.answer_ends import TemplateReport
    from frugal.data.batch import collate
    from frugal.data.chat.templates import TEMPLATES, choose_template
    from frugal.data.dataset import TokenDataset
    from frugal.data.encode import encode_prompt
    from frugal.data.pipeline import PreparedData, build
    from frugal.data.preview import PreviewData, preview_rows, render_preview
    from frugal.data.report import DataReport
    from frugal.data.rows import Example, Message, TokenRow

_HOME = {
    "DataReport": "report",
    "Example": "rows",
    "Message": "rows",
    "PreparedData": "pipeline",
    "PreviewData": "preview",
    "TEMPLATES": "chat.templates",
    "TemplateReport": "answer_ends",
    "TokenDataset": "dataset",
    "TokenRow": "rows",
    "build": "pipeline",
    "choose_template": "chat.templates",
    "collate": "batch",
    "encode_prompt": "encode",
    "preview_rows": "preview",
    "render_preview": "preview",
}

__all__ = [
    "TEMPLATES",
    "DataReport",
    "Example",
    "Message",
    "PreparedData",
    "PreviewData",
    "TemplateReport",
    "TokenDataset",
    "TokenRow",
    "build",
    "choose_template",
    "collate",
    "encode_prompt",
    "preview_rows",
    "render_preview",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
