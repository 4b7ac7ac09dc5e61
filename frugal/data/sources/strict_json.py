"""JSON as training data needs it: nothing is lost or invented on the way in.

Python's own parser accepts NaN and Infinity, keeps the last of two equal keys, turns 1e999 into infinity and lets lone
surrogates through, which break later in the tokenizer. Here all of these are faults with a reason. Keys keep order.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from frugal.data.rows import RowError, shorten

NOT_JSON = "not valid JSON"
RIGHT_FORM = '{"prompt": "...", "completion": "..."}'

_TRAILING_COMMA = "a comma before the closing bracket"
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowError("a key is given twice in one object", f"{shorten(twice)}; keep one of them")
    return value


def _constant(name: str) -> NoReturn:
    raise RowError("NaN and Infinity are not JSON", f"{name}; write null, or leave the key out")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RowError("a number is too large", "write it as text, in quotes")
    return value


_LENIENT = json.JSONDecoder(parse_int=str)
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def skip_space(text: str, start: int) -> int:
    """Index of the first character from ``start`` that is not JSON white space."""
    match = _SPACE.match(text, start)
    return start if match is None else match.end()


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that starts at ``start`` and the index behind it.

    Raises:
        JsonSyntaxError: it is not JSON; nothing behind this place can be trusted.
        RowError: it is JSON with something that may not be in a row.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise JsonSyntaxError(text, error.pos, error.msg) from None
    except RecursionError:
        raise JsonSyntaxError(text, start, "nested too deeply") from None
    except ValueError:  # a whole number of more digits than Python converts
        raise RowError("a number has too many digits", "write it as text, in quotes") from None
    if _SURROGATE_ESCAPE.search(text, start, end):
        refuse_surrogates(value)
    return value, int(end)


def end_of_value(text: str, start: int) -> int:
    """Index behind the value at ``start``, which may hold what `decode_at` refuses.

    Raises:
        JsonSyntaxError: it is not JSON.
    """
    try:
        return int(_LENIENT.raw_decode(text, start)[1])
    except json.JSONDecodeError as error:
        raise JsonSyntaxError(text, error.pos, error.msg) from None
    except RecursionError:
        raise JsonSyntaxError(text, start, "nested too deeply") from None


def loads(text: str) -> Any:
    """One JSON value that is the whole of ``text``.

    Raises:
        RowError: the text is not JSON (`JsonSyntaxError`), or has something that may not be in a row.
    """
    value, end = decode_at(text, skip_space(text, 0))
    end = skip_space(text, end)
    if end != len(text):
        raise JsonSyntaxError(text, end, "Extra data")
    return value


def refuse_surrogates(value: Any) -> None:
    """Raise when a text in ``value`` holds half of a surrogate pair: it is no character and cannot be tokenised."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(
            "a text holds a lone surrogate escape (half of a \\uD83D\\uDE00 pair)",
            "write both halves, or the character itself; \\ufffd stands for one that is lost",
        ) from None


class JsonSyntaxError(RowError):
    """Text that is not JSON, with what is wrong in words and the place in ``position`` (a character index)."""

    def __init__(self, text: str, position: int, message: str) -> None:
        self.hint = _hint(text, position, message)
        if self.hint == _TRAILING_COMMA and text[position : position + 1] != ",":
            position = text.rfind(",", 0, position)  # Python before 3.13 points at the bracket
        self.position = position
        column = position - text.rfind("\n", 0, position)
        super().__init__(NOT_JSON, f"column {column}: {self.hint}")


def _hint(text: str, position: int, message: str) -> str:
    """What is wrong at ``position``; ``message`` is the parser's own word for it, used when no better one is known."""
    here = text[position : position + 1]
    before = text[:position].rstrip()[-1:] if position < 10_000 else text[position - 10_000 : position].rstrip()[-1:]
    if message.startswith("Extra data"):
        if here == ",":
            return "a comma after the object; JSON Lines has one object a line and nothing between"
        return "more text after the value"
    if message.startswith("nested"):
        return f"{message}: hundreds of brackets inside each other; a row needs a few"
    if "trailing comma" in message or (here and here in "}]" and before == ","):
        return _TRAILING_COMMA
    if message.startswith("Unterminated string"):
        return "a text that starts here has no closing quote"
    if skip_space(text, position) == len(text):
        return "it ends in the middle of a value"
    if here == "'":
        return "single quotes; JSON needs double quotes"
    if re.match(r"(None|True|False)\b", text[position : position + 6]):
        return "a Python word; JSON writes null, true and false"
    return message[:1].lower() + message[1:]
