"""JSON and JSON Lines files into rows with the line each starts on.

Accepted: an object a line (`.jsonl`, `.ndjson`, and `.json` too), one array of objects, one object `{"data": [...]}`
around such an array, or a single object (one row). Lines mode reads line by line; the other forms read the file whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from frugal.data.rows import BadRow, RawRow, RowError, kind_of
from frugal.data.sources.encoding import decode, first_bad_byte, refuse_utf16
from frugal.data.sources.strict_json import RIGHT_FORM, JsonSyntaxError, decode_at, end_of_value, loads, skip_space
from frugal.errors import DataError

_BOM = b"\xef\xbb\xbf"
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""Lines, also those that end in a carriage return alone, as old spreadsheets write. In JSON it is only white space."""
_LONE_CARRIAGE_RETURN = re.compile(rb"\r(?!\n)")


def read_json(handle: BinaryIO, file: str) -> Iterator[RawRow | BadRow]:
    """Rows of a JSON or JSON Lines file; the first text decides which it is.

    Raises:
        DataError: the file is empty, or is not UTF-8 text at all (UTF-16).
    """
    lines = _placed(_without_bom(handle, file))
    head: list[_Line] = []
    for number, line in lines:
        if line.strip():
            head.append((number, line))
            break
    if not head:
        raise DataError(f"{file}: the file is empty. A row is written like this: {RIGHT_FORM}")
    first = head[0][1].strip()
    if first[:1] == b"[" and not _is_whole(first):
        yield from _whole(head, lines, file)
        return
    if first[:1] == b"{" and not _is_whole(first):
        # A pretty-printed object, or a first line that is broken: then other lines are objects by themselves.
        rest = list(lines)
        if _is_whole(b"".join(line for _, line in head + rest)) or not _has_object_line(rest):
            yield from _whole(head, rest, file)
            return
        head += rest
    else:
        # A whole value on the first line: a file of one line may be an array or a wrapper, else each line is a row.
        more = next(((number, line) for number, line in lines if line.strip()), None)
        if more is None:
            yield from _whole(head, (), file)
            return
        head.append(more)
    yield from _lines(itertools.chain(head, lines), file)


def _without_bom(handle: BinaryIO, file: str) -> Iterator[bytes]:
    """Lines of the file without a byte order mark."""
    first = handle.readline()
    refuse_utf16(first, file)
    for line in itertools.chain([first.removeprefix(_BOM)], handle):
        yield from _LINE.findall(line) if b"\r" in line else (line,)


class _Place(NamedTuple):
    """Where a line starts."""

    line: int
    offset: int
    """Byte of the file, a byte order mark not counted."""


_Line = tuple[_Place, bytes]


def _placed(lines: Iterable[bytes]) -> Iterator[_Line]:
    offset = 0
    for number, line in enumerate(lines, start=1):
        yield _Place(number, offset), line
        offset += len(line)


def _is_whole(line: bytes) -> bool:
    """Whether a line is one JSON value by itself."""
    try:
        loads(line.decode("utf-8"))
    except JsonSyntaxError as fault:
        # `{"a": 1},` is a row with a comma too much, not the beginning of a longer value.
        return "after the object" in fault.hint
    except UnicodeDecodeError:
        return False
    except RowError:
        return True
    return True


def _has_object_line(lines: list[_Line]) -> bool:
    return any(line[:1] == b"{" and line.rstrip()[-1:] == b"}" and _is_whole(line) for _, line in lines[:200])


def _lines(lines: Iterable[_Line], file: str) -> Iterator[RawRow | BadRow]:
    for (number, offset), line in lines:
        if not line.strip():
            continue
        try:
            yield _row(loads(decode(line.rstrip(b"\r\n"), file, offset)), file, number)
        except RowError as fault:
            yield BadRow(fault, file, number)


def _row(value: Any, file: str, line: int) -> RawRow | BadRow:
    if isinstance(value, dict):
        return RawRow(value, file, line)
    fault = RowError(f"the row is {kind_of(value)}, not an object", f"a row is written like this: {RIGHT_FORM}")
    return BadRow(fault, file, line)


def _whole(head: list[_Line], lines: Iterable[_Line], file: str) -> Iterator[RawRow | BadRow]:
    """Rows of a file that is one JSON value."""
    first_line, offset = head[0][0]
    data = _LONE_CARRIAGE_RETURN.sub(b"\n", b"".join(line for _, line in itertools.chain(head, lines)))
    try:
        text = decode(data, file, offset)
    except RowError as fault:
        line = first_line + data.count(b"\n", 0, first_bad_byte(data))
        yield BadRow(fault, file, line, fatal=True)
        return
    start = skip_space(text, 0)
    if text[start] == "[":
        yield from _array(text, start, file, first_line)
        return
    try:
        value, end = decode_at(text, start)
        if skip_space(text, end) != len(text):
            raise JsonSyntaxError(text, skip_space(text, end), "Extra data")
    except RowError as fault:
        yield _fatal(fault, text, start, file, first_line)
        return
    if isinstance(value, dict) and list(value) == ["data"] and isinstance(value["data"], list):
        # Decoded once more, row by row, so that rows have line numbers and faults of one row stay its own.
        inner = text.index("[", skip_space(text, start + 1) + len('"data"'))
        yield from _array(text, inner, file, first_line, closing="}")
        return
    yield _row(value, file, first_line)


def _array(text: str, start: int, file: str, line: int, closing: str = "") -> Iterator[RawRow | BadRow]:
    """Rows of the array whose `[` is at ``start``; ``line`` is the line of the text's first character."""
    counted = 0
    position = skip_space(text, start + 1)
    comma = False
    rows = 0
    while True:
        line += text.count("\n", counted, position)
        counted = position
        if text[position : position + 1] == "]":
            if comma:
                yield _fatal(JsonSyntaxError(text, position, "trailing comma"), text, counted, file, line)
                return
            break
        try:
            value, position = decode_at(text, position)
        except JsonSyntaxError as fault:
            yield _fatal(fault, text, counted, file, line)
            return
        except RowError as fault:
            yield BadRow(fault, file, line)
            try:
                position = end_of_value(text, position)
            except JsonSyntaxError as worse:
                yield _fatal(worse, text, counted, file, line)
                return
        else:
            yield _row(value, file, line)
        rows += 1
        position = skip_space(text, position)
        comma = text[position : position + 1] == ","
        if comma:
            position = skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            message = "Expecting ',' between two rows or ']' after the last"
            yield _fatal(JsonSyntaxError(text, position, message), text, counted, file, line)
            return
    end = skip_space(text, position + 1)
    if closing and text[end : end + 1] == closing:
        end = skip_space(text, end + 1)
    if end != len(text):
        yield _fatal(JsonSyntaxError(text, end, "Extra data"), text, counted, file, line)
    elif rows == 0:
        raise DataError(f"{file}: the array is empty. A row is written like this: [{RIGHT_FORM}]")


def _fatal(fault: RowError, text: str, known: int, file: str, line: int) -> BadRow:
    """A fault that ends the file, at the line of its own position; ``known`` is a character on ``line``."""
    if isinstance(fault, JsonSyntaxError):
        line += text.count("\n", known, fault.position) - text.count("\n", fault.position, known)
    return BadRow(fault, file, line, fatal=True)
