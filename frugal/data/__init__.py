"""Data: read, render, mask, truncate, pack, cache, batch. Names are imported when they are first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frugal.data.account import Account
    from frugal.data.assemble import PreparedData, build
    from frugal.data.batch import collate
    from frugal.data.dataset import TokenDataset
    from frugal.data.order import step_batches
    from frugal.data.preflight import TemplateReport
    from frugal.data.preview import PreviewData, preview_rows, render_preview
    from frugal.data.prompt import encode_prompt
    from frugal.data.templates import TEMPLATES, choose_template
    from frugal.data.types import Example, Message, TokenRow

_HOME = {
    "Account": "account",
    "Example": "types",
    "Message": "types",
    "PreparedData": "assemble",
    "PreviewData": "preview",
    "TEMPLATES": "templates",
    "TemplateReport": "preflight",
    "TokenDataset": "dataset",
    "TokenRow": "types",
    "build": "assemble",
    "choose_template": "templates",
    "collate": "batch",
    "encode_prompt": "prompt",
    "preview_rows": "preview",
    "render_preview": "preview",
    "step_batches": "order",
}

__all__ = [
    "TEMPLATES",
    "Account",
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
    "step_batches",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
