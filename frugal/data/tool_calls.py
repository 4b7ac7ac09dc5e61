"""Tool descriptions and tool calls in the form that chat templates expect (OpenAI's), arguments as objects."""

from __future__ import annotations

import json
from typing import Any

from frugal.data.faults import RowFault, kind_of
from frugal.data.strict_json import loads


def json_or_value(value: Any, what: str) -> Any:
    """``value``, decoded when it is a text that holds JSON."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except RowFault as fault:
        raise RowFault(f"{what}: {fault.reason}", fault.detail) from None


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Tool descriptions as `{"type": "function", "function": {...}}`; None when there are none.

    ``value`` is a list or its JSON text; bare `{"name": ..., "parameters": ...}` descriptions are wrapped.

    Raises:
        RowFault: not JSON, not a list of objects, or a description without a name.
    """
    if value is None or value == "":
        return None
    tools = json_or_value(value, "`tools`")
    if not isinstance(tools, list):
        raise RowFault(f"`tools` is {kind_of(tools)}, not a list")
    described = []
    for number, tool in enumerate(tools, start=1):
        if isinstance(tool, str):  # each description as JSON text of its own, as columnar files hold them
            tool = json_or_value(tool, "`tools`")
        inner = tool.get("function") if isinstance(tool, dict) and "function" in tool else tool
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RowFault("a tool description has no name", f"tool {number}")
        _require_json(tool, f"tool {number}")
        described.append(tool if inner is not tool else {"type": "function", "function": tool})
    return described or None


def tool_calls_of(value: Any, turn: str) -> list[dict[str, Any]]:
    """Tool calls as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, with `id` where it is given.

    ``value`` is one call or a list, or its JSON text. A call is in OpenAI's form or bare `{"name", "arguments"}`;
    arguments are an object or its JSON text, and missing, null or empty ones are `{}`.

    Raises:
        RowFault: not JSON, no call in it, a call without a name, or arguments that are no object.
    """
    calls = json_or_value(value, "a tool call")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        what = "an empty list" if calls == [] else kind_of(calls)
        raise RowFault(f"a tool call is {what}, not an object with name and arguments", turn)
    return [_call(call, turn) for call in calls]


def _call(call: Any, turn: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = json_or_value(call, "a tool call")
    if not isinstance(call, dict):
        raise RowFault(f"a tool call is {kind_of(call)}, not an object with name and arguments", turn)
    kind = call.get("type") or "function"
    if kind != "function":
        raise RowFault("a tool call is not of type function", turn)
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowFault("a tool call has no name", turn)
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    arguments = json_or_value(arguments, "arguments of a tool call")
    if not isinstance(arguments, dict):
        raise RowFault(f"arguments of a tool call are {kind_of(arguments)}, not an object", turn)
    _require_json(arguments, turn)
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _require_json(value: Any, where: str) -> None:
    """Columnar files can hold dates and bytes, which no template can print as JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise RowFault("a tool call or description holds a value that JSON has no form for", where) from None
