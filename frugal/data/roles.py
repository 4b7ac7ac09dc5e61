"""Names that other tools give to the speakers of a chat, and the role each one becomes."""

from __future__ import annotations

from typing import Any

from frugal.data.faults import RowFault, kind_of, shorten
from frugal.data.types import Role

FUNCTION_CALL = "function_call"
"""Not a role of chat templates: an assistant turn whose text is the JSON of one or more tool calls."""

ROLE_ALIASES: dict[str, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bard", "model"),
    FUNCTION_CALL: ("function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
}
"""What a turn becomes -> the words for it in files, letter case aside. `function_call` becomes an assistant turn."""

_BY_WORD: dict[str, str] = {word: role for role, words in ROLE_ALIASES.items() for word in words}
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def role_table() -> str:
    """The table of roles as text, one role a line."""
    width = max(map(len, ROLE_ALIASES))
    lines = [f"{role:<{width}}  {', '.join(words)}" for role, words in ROLE_ALIASES.items()]
    return "\n".join([*lines, "Letter case does not matter (Assistant, USER)."])


def role_of(word: Any, turn: str) -> tuple[Role, bool]:
    """(role, whether the turn is a function call) for a role's word in a file; ``turn`` is for the message.

    Raises:
        RowFault: not a text, or a word that the table does not have.
    """
    if not isinstance(word, str):
        raise RowFault("a role is not a text", f"{turn}: {kind_of(word)}")
    known = _BY_WORD.get(word) or _BY_WORD.get(word.strip().casefold())
    if known is None:
        raise RowFault("unknown role", f"{shorten(word)} in {turn}; known: {', '.join(_BY_WORD)}")
    if known == FUNCTION_CALL:
        return "assistant", True
    return _ROLES[known], False
