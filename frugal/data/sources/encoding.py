"""Files that are not UTF-8: which byte, where in the file, the probable encoding, and the command that converts."""

from __future__ import annotations

import shlex

from frugal.data.rows import RowError
from frugal.errors import DataError

_UNDEFINED_IN_1252 = frozenset((0x81, 0x8D, 0x8F, 0x90, 0x9D))
NOT_UTF8 = "not UTF-8 text"
NEWLINE = b"\n"


def refuse_utf16(head: bytes, file: str) -> None:
    """Raise DataError when a file begins as UTF-16 or UTF-32 does, with or without a byte order mark."""
    if head[:4] in (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"):
        name = "UTF-32"
    elif head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        name = "UTF-16"
    elif len(head) > 3 and not any(head[1:64:2]) and all(head[:64:2]):
        name = "UTF-16LE"
    elif len(head) > 3 and not any(head[:64:2]) and all(head[1:64:2]):
        name = "UTF-16BE"
    else:
        return
    raise DataError(f"{file}: the file is {name} (seen from its first bytes, offset 0). {convert(file, name)}")


def convert(file: str, encoding: str) -> str:
    """The sentence with the command that makes a file UTF-8."""
    return f"Save it as UTF-8, for example: iconv -f {encoding} -t UTF-8 {shlex.quote(file)} > converted"


def decode(data: bytes, file: str, offset: int = 0) -> str:
    """``data``, which begins at byte ``offset`` of the file, as UTF-8 text.

    Raises:
        RowError: it is not; the detail names byte, place, probable encoding and the command.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = error.start - data.rfind(b"\n", 0, error.start)
        high = {byte for byte in data if byte >= 0x80}
        likely = "ISO-8859-1" if high & _UNDEFINED_IN_1252 else "WINDOWS-1252"
        raise RowError(
            NOT_UTF8,
            f"byte 0x{data[error.start]:02x}, byte {place} of the line, offset {offset + error.start:,} of the file; "
            f"probably {likely}. {convert(file, likely)}",
        ) from None


def first_bad_byte(data: bytes) -> int:
    """Index of the first byte that is not UTF-8; the length when there is none."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return len(data)
