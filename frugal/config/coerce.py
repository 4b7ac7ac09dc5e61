"""From what a file says to what a field wants. The field decides how text is read; text never becomes a wrong type.

One rule for quoted and plain values, so that `learning_rate: "2e-4"` works and `trust_remote_code: "false"` is false.
Every fault is collected; the caller reports them together.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from pydantic import BaseModel

from frugal.config.models import SourceSection
from frugal.config.yaml import Path, is_null, read_bool, read_number

MISSING = object()
"""Returned where a fault was reported: there is no value to go on with."""

Report = Callable[[Path, str], None]
Unknown = Callable[[Path, str, Any, type[BaseModel]], None]

_NAME_LIST = re.compile(r"[^\s,]+(\s*,\s*[^\s,]+)+\s*")
_MODULE_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_SENTENCES = {"sample_prompts"}  # lists whose entries may hold commas
_BOOL_WORDS = {"yes": True, "on": True, "1": True, "y": True, "no": False, "off": False, "0": False, "n": False}
_PERCENT = re.compile(r"\s*([0-9.]+)\s*%\s*")


def got(value: Any) -> str:
    """What was written, as a message shows it: short, on one line."""
    if is_null(value):
        return "nothing"
    if isinstance(value, dict):
        return f"a section with {', '.join(map(str, list(value)[:3]))}" if value else "an empty section"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return repr(str(shown))
    return f"{str(value)[:60]} ({type(value).__name__})"


def section(model: type[BaseModel], value: Any, path: Path, report: Report, unknown: Unknown) -> Any:
    """A mapping to keyword values of `model`; keys that it does not have go to `unknown`."""
    if is_null(value):
        value = {}  # `train:` with every key commented out
    if not isinstance(value, dict):
        keys = ", ".join(list(model.model_fields)[:3])
        report(path, f"got {got(value)}; a section is meant: keys ({keys}, ...) indented below it")
        return MISSING
    result = {}
    for key, item in value.items():
        here = (*path, key)
        if not isinstance(key, str):
            report(here if isinstance(key, int) else path, f"the key {key!r} is not text")
        elif key in model.model_fields:
            read = field(model.model_fields[key].annotation, item, here, report, unknown)
            if read is not MISSING:
                result[key] = read
        elif not (path == () and key.startswith("x-")):
            unknown(path, key, item, model)
    return result


def field(wanted: Any, value: Any, path: Path, report: Report, unknown: Unknown) -> Any:
    """One value as `wanted`, a type annotation of config/models.py; MISSING after a fault."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    origin = typing.get_origin(wanted)
    if origin in (Union, types.UnionType):
        options = [option for option in typing.get_args(wanted) if option is not type(None)]
        if is_null(value) and len(options) < len(typing.get_args(wanted)):
            return None
        if len(options) > 1:
            return _names_or_pattern(value, path, report, unknown)
        return field(options[0], value, path, report, unknown)
    if origin is list:
        (inner,) = typing.get_args(wanted)
        return _list(inner, value, path, report, unknown)
    if origin is dict:
        return _table(typing.get_args(wanted)[1], value, path, report, unknown)
    if origin is Literal:
        return _choice(typing.get_args(wanted), value, path, report)
    if isinstance(wanted, type) and issubclass(wanted, BaseModel):
        return section(wanted, value, path, report, unknown)
    reader = {str: _text, bool: _boolean, int: _whole, float: _number}[wanted]
    return reader(value, path, report)


def _text(value: Any, path: Path, report: Report) -> Any:
    if isinstance(value, str) and not is_null(value):
        return str(value)
    report(path, f"got {got(value)}; text is meant" + _quote_hint(value))
    return MISSING


def _quote_hint(value: Any) -> str:
    if isinstance(value, dict) and value:
        return " (text that contains `: ` needs quotes)"
    return f': write "{value}"' if isinstance(value, (int, float)) else ""


def _boolean(value: Any, path: Path, report: Report) -> Any:
    if isinstance(value, bool):
        return value
    read = read_bool(value) if isinstance(value, str) else None
    if read is None:
        meant = _BOOL_WORDS.get(str(value).strip().lower())
        report(
            path, f"got {got(value)}; allowed: true or false" + _write(None if meant is None else str(meant).lower())
        )
        return MISSING
    return read


def _write(text: str | None) -> str:
    return "" if text is None else f". Write {text}"


def _number(value: Any, path: Path, report: Report, what: str = "a number") -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):
            return value
        report(path, f"got {value}; {what} is meant")
        return MISSING
    if not isinstance(value, str) or is_null(value):
        report(path, f"got {got(value)}; {what} is meant")
        return MISSING
    try:
        read = read_number(value)
    except ValueError as error:
        report(path, f"got {got(value)}, which {error}")
        return MISSING
    if read is None:
        report(path, f"got {got(value)}; {what} is meant" + _number_hint(value))
        return MISSING
    return read


def _number_hint(text: str) -> str:
    if percent := _PERCENT.fullmatch(text):
        try:
            return f". Write {float(percent[1]) / 100:g}"
        except ValueError:
            return ""
    if re.fullmatch(r"[0-9]+(:[0-9]+)+", text):
        return ". Times and base-60 numbers are not read"
    without = re.sub(r"[_, ]", "", text)
    try:
        return f". Write {without}" if without != text and read_number(without) is not None else ""
    except ValueError:
        return ""


def _whole(value: Any, path: Path, report: Report) -> Any:
    read = _number(value, path, report, "a whole number")
    if read is MISSING or isinstance(read, int):
        return read
    if read == int(read):
        return int(read)
    report(path, f"got {read:g}; a whole number is meant")
    return MISSING


def _choice(options: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    if isinstance(value, str) and str(value) in options:
        return str(value)
    flag = read_bool(value) if isinstance(value, str) else value
    if isinstance(flag, bool) and any(option is flag for option in options):
        return flag
    words = [str(option).lower() if isinstance(option, bool) else option for option in options]
    allowed = ", ".join(words)
    nothing = is_null(value) or value is False or (isinstance(value, str) and read_bool(value) is False)
    if nothing and "none" in options:
        report(path, f"got {got(value)}; allowed: {allowed}. Write none to turn it off")
    elif isinstance(value, str) and value.lower() in words:
        report(path, f"got {got(value)}; allowed: {allowed}. Write {value.lower()}")
    else:
        report(path, f"got {got(value)}; allowed: {allowed}")
    return MISSING


def _list(inner: Any, value: Any, path: Path, report: Report, unknown: Unknown) -> Any:
    sources = inner is SourceSection
    if isinstance(value, str) and not is_null(value):
        if (
            path[-1] not in _SENTENCES
            and _NAME_LIST.fullmatch(value)
            and not (sources and pathlib.Path(value).exists())
        ):
            report(path, f"got {got(value)}, one text; a list is meant: write {_as_list(value)}")
            return MISSING
        value = [value]
    elif sources and isinstance(value, dict):
        value = [value]
    if not isinstance(value, (list, tuple)):
        hint = ". Write [] for none" if is_null(value) or value is False else ""
        report(path, f"got {got(value)}; a list is meant{hint}")
        return MISSING
    result = []
    for index, item in enumerate(value):
        if sources and isinstance(item, (str, os.PathLike)) and not is_null(item):
            item = {"path": item}
        read = field(inner, item, (*path, index), report, unknown)
        if read is not MISSING:
            result.append(read)
    return result


def _as_list(text: str) -> str:
    return "[" + ", ".join(part.strip() for part in text.split(",")) + "]"


def _names_or_pattern(value: Any, path: Path, report: Report, unknown: Unknown) -> Any:
    """`lora.target_modules`: `all-linear`, one name (made a list of one), a regular expression, or a list of names."""
    if not isinstance(value, str):
        return _list(str, value, path, report, unknown)
    if is_null(value):
        report(path, "got nothing; allowed: all-linear, a list of module names, or a regular expression")
        return MISSING
    parts = [part.strip() for part in value.split(",")]
    if len(parts) > 1 and all(_MODULE_NAME.fullmatch(part) for part in parts):
        report(path, f"got {got(value)}, one text; a list is meant: write {_as_list(value)}")
        return MISSING
    if value != "all-linear" and _MODULE_NAME.fullmatch(value):
        return [str(value)]
    return str(value)


def _table(inner: Any, value: Any, path: Path, report: Report, unknown: Unknown) -> Any:
    if is_null(value):
        return {}
    if not isinstance(value, dict):
        report(path, f"got {got(value)}; a table `name: value` is meant")
        return MISSING
    result = {}
    for key, item in value.items():
        read = field(inner, item, (*path, str(key)), report, unknown)
        if read is not MISSING:
            result[str(key)] = read
    return result
