"""Files that are not UTF-8: which byte, where in the file, the probable encoding, and the command that converts."""

from __future__ import annotations

from frugal.data.rows import RowError
from frugal.errors import DataError
from frugal.files import about_encoding, convert, wide_encoding

NOT_UTF8 = "not UTF-8 text"


def refuse_utf16(head: bytes, file: str) -> None:
    """Raise DataError when a file begins as UTF-16 or UTF-32 does, with or without a byte order mark."""
    name = wide_encoding(head)
    if name is not None:
        raise DataError(f"{file}: the file is {name} (seen from its first bytes, offset 0). {convert(file, name)}")


def decode(data: bytes, file: str, offset: int = 0) -> str:
    """``data``, which begins at byte ``offset`` of the file, as UTF-8 text.

    Raises:
        RowError: it is not; the detail names byte, place, probable encoding and the command.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(NOT_UTF8, about_encoding(error, file, offset)) from None


def line_of(data: bytes, index: int) -> int:
    """Number, from 1, of the line that byte ``index`` is in; a line may end in a carriage return alone."""
    return len((data[:index] + b".").splitlines())


def first_bad_byte(data: bytes) -> int:
    """Index of the first byte that is not UTF-8; the length when there is none."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return len(data)
