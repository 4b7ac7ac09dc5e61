"""Render the page templates: autoescaped, and complete in one file (no script, no font, no picture is loaded)."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("frugal.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> Markup:
    """Fill ``templates/<template>.jinja``; text from outside is escaped, what `render` returned before is not."""
    return Markup(_environment().get_template(f"{template}.jinja").render(values))
