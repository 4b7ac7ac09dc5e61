"""Field types of the schema: how text becomes a number, a flag or a list, and how messages name what is allowed.

Quoted and plain text are read alike: `learning_rate: "2e-4"` is a number and `trust_remote_code: "false"` is false.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AllowInfNan, BaseModel, BeforeValidator, Field, Strict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from frugal.config.yaml import read_bool, read_number

T = TypeVar("T")

_JOINED_NAMES = re.compile(r"[^\s,]+(\s*,\s*[^\s,]+)+\s*")
_MODULE_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_BOOL_WORDS = {"yes": "true", "on": "true", "1": "true", "y": "true", "no": "false", "off": "false", "0": "false"}


def _text(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and "\0" in text:  # no file has it in its name, and C code takes it for the end
        raise ValueError("must not hold the character NUL", "write the text without \\0")
    return text


def _flag(value: Any) -> Any:
    read = read_bool(value) if isinstance(value, str) else None
    return value if read is None else read


def _auto_flag(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # pydantic takes 1 for True in a Literal
        raise ValueError("must be auto, true or false")
    return _flag(value)


def _number(value: Any) -> Any:
    read = read_number(value) if isinstance(value, str) else None
    return value if read is None else read


def _whole(value: Any) -> Any:
    read = _number(value)
    return int(read) if isinstance(read, float) and math.isfinite(read) and read == int(read) else read


def _refuse_joined(text: str) -> None:
    if _JOINED_NAMES.fullmatch(text):
        raise ValueError("must be a list", f"write [{', '.join(part.strip() for part in text.split(','))}]")


def _list(value: Any) -> Any:
    if isinstance(value, str):
        _refuse_joined(value)
    return _sentences(value)


def _sentences(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, tuple) else value


def read_sources(value: Any) -> Any:
    """A path, a source, or a list of both, as a list of sources."""
    if isinstance(value, str) and not pathlib.Path(value).exists():
        _refuse_joined(value)
    if isinstance(value, (str, os.PathLike, dict, BaseModel)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    return [{"path": item} if isinstance(item, (str, os.PathLike)) else item for item in value]


def read_trackers(value: Any) -> Any:
    """Names of trackers; `none`, as transformers has it, is told its word here."""
    words = value if isinstance(value, list) else [value]
    if any(isinstance(word, str) and word.lower() == "none" for word in words):
        raise ValueError("must be a list of trackers", "write [] for none")
    return _list(value)


def _targets(value: Any) -> Any:
    """`all-linear`, one name (made a list of one), a regular expression, or a list of names."""
    words = value if isinstance(value, list) else [value]
    if any(word in ("all", "ALL", "all_linear") or word == "all-linear" != value for word in words):
        raise ValueError("must be all-linear, a list of module names, or a regular expression", "write all-linear")
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if all(_MODULE_NAME.fullmatch(part) for part in parts) and value != "all-linear":
            return _list(value)
        return value
    names = _sentences(value)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("must be all-linear, a list of module names, or a regular expression")
    return names


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _excluded(value: Any) -> Any:
    """One name (made a list of one), a regular expression, or a list of names."""
    if value == "all-linear":
        raise ValueError("must be a list of module names, or a regular expression", "it would leave nothing to train")
    return [] if value is None else _targets(value)


def _wholes(value: Any) -> Any:
    """One whole number (made a list of one), or a list of them."""
    items = [] if value is None else _list([value] if isinstance(value, (int, float)) else value)
    read = [_whole(item) for item in items] if isinstance(items, list) else []
    below = [item for item in read if isinstance(item, int) and item < 0]
    if below:
        raise ValueError(f"must be whole numbers >= 0 (not {below[0]})")
    return items


def _frozen_bias(value: Any) -> Any:
    if value != "none":
        raise ValueError(
            "must be none",
            "write none, or leave it out. Biases are part of the base, which stays as it is, so that an adapter can be "
            "switched off, merged and moved; to train a layer with its bias name it in lora.modules_to_save",
        )
    return value


def _table(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return {} if value is None else value


Text = Annotated[str, Strict(), BeforeValidator(_text)]
Name = Annotated[Text, AfterValidator(_not_blank)]
Flag = Annotated[bool, Strict(), BeforeValidator(_flag)]
AutoFlag = Annotated[Literal["auto", True, False], BeforeValidator(_auto_flag)]
Number = Annotated[float, Strict(), AllowInfNan(False), BeforeValidator(_number)]
Whole = Annotated[int, Strict(), BeforeValidator(_whole)]
Targets = Annotated[str | list[str], BeforeValidator(_targets)]
Excluded = Annotated[str | list[str], BeforeValidator(_excluded)]
FrozenBias = Annotated[Literal["none"], BeforeValidator(_frozen_bias)]
Table = Annotated[dict[str, T], BeforeValidator(_table)]


def one_or_more(item: Any, read: Callable[[Any], Any] = _list) -> BeforeValidator:
    """Validator of a list field whose value may be one `item`; the JSON schema allows both."""
    return BeforeValidator(read, json_schema_input_type=item | list[item])


Wholes = Annotated[list[Annotated[Whole, Field(ge=0)]], one_or_more(int, _wholes)]
Names = Annotated[list[Text], one_or_more(str)]
Sentences = Annotated[list[Text], one_or_more(str, _sentences)]


def got(value: Any) -> str:
    """What was written, as a message shows it: short, on one line."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return f"a section with {', '.join(map(str, list(value)[:3]))}" if value else "an empty section"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return f"{value:.10g}" if isinstance(value, float) else str(value)[:60]


def allowed(annotation: Any, info: FieldInfo | None = None) -> str:
    """What a value of `annotation` may be, with the bounds that `info` sets: "a whole number >= 1", "`a` or `b`"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    names = {str: "text", int: "a whole number", float: "a number", bool: "`true` or `false`"}
    if origin is Annotated:
        return allowed(arguments[0], info)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(allowed(argument, info) for argument in arguments if argument is not type(None))
    if origin is Literal:
        words = [f"`{str(word).lower() if isinstance(word, bool) else word}`" for word in arguments]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    if origin is list:
        return f"a list of {allowed(arguments[0])}"
    if origin is dict:
        return f"a table of names, each with {allowed(arguments[1])}"
    if annotation not in names:
        return "sources"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in (info.metadata if info else [])
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return f"{names[annotation]} {' and '.join(bounds)}".rstrip()


def describe(detail: ErrorDetails, annotation: Any, info: FieldInfo | None) -> str:
    """pydantic's finding about a field as "must be ..., got ...: write ..."."""
    kind, value = detail["type"], detail["input"]
    about = " ".join(info.description.split()) if info and info.description else ""
    if kind == "missing":
        return "is missing and has no default" + (f". {about}" if about else "")
    if kind == "value_error":  # of a function above or of read_number: what must be, and perhaps what to write
        must, *hint = detail["ctx"]["error"].args
    elif kind == "string_pattern_mismatch":
        must, hint = "must be auto or a size", [about]  # memory.budget is the only pattern
    else:
        must, hint = f"must be {allowed(annotation, info).replace('`', '')}", [_hint(kind, value, detail)]
    return f"{must}, got {got(value)}" + "".join(f": {text}" for text in hint if text)


def _hint(kind: str, value: Any, detail: ErrorDetails) -> str:
    """What to write instead, where the value tells what was meant."""
    nothing = value is None or value is False or value in ("false", "False", "FALSE")
    if kind == "list_type":
        return "write [] for none" if nothing else ""
    if kind == "literal_error":
        options = re.split(", | or ", detail["ctx"]["expected"].replace("'", ""))
        word = "none" if nothing else str(value).lower()
        return f"write {word}" if word in options else ""
    if kind == "bool_type" and str(value).lower() in _BOOL_WORDS:
        return f"write {_BOOL_WORDS[str(value).lower()]}"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f'write "{value}"'
    if kind == "string_type" and isinstance(value, dict) and value:
        return "text that contains `: ` needs quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        plain = re.sub(r"[_, ]", "", value)
        number = re.fullmatch(r"[0-9]+(\.[0-9]+)?", plain.removesuffix("%"))
        if number:
            return f"write {float(number[0]) / 100:g}" if plain.endswith("%") else f"write {plain}"
    return ""
