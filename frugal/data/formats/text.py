"""Plain text: every token is trained."""

from __future__ import annotations

from typing import Any

from frugal.data.formats.turns import Roles, text_of
from frugal.data.rows import Example


def fill_text(value: dict[str, Any], example: Example, roles: Roles) -> None:
    """The row's text as it is."""
    example.kind = "text"
    example.text = text_of(value, "text")
