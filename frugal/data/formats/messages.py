"""Chats: a list of turns under `messages` or, in ShareGPT's words, `conversations`."""

from __future__ import annotations

from typing import Any

from frugal.data.formats.turns import Roles, messages_of, with_system
from frugal.data.rows import Example


def fill_messages(value: dict[str, Any], example: Example, roles: Roles, *, key: str = "messages") -> None:
    """Messages of the turns under ``key``, a row's own `system` text in front."""
    example.messages = with_system(messages_of(value[key], key, roles), value.get("system"))
