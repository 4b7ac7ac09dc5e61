"""CSV and TSV (RFC 4180) into rows with the line each starts on."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator
from typing import BinaryIO

from frugal.data.rows import BadRow, RawRow, RowError, shorten
from frugal.data.sources.encoding import decode, first_bad_byte, line_of, refuse_utf16
from frugal.errors import DataError

_SEPARATOR_LINE = re.compile(r"sep=([,;\t|])[ \t]*(?:\r\n|\n|\r)", re.IGNORECASE)


def read_csv(handle: BinaryIO, file: str, separator: str) -> Iterator[RawRow | BadRow]:
    """Rows as texts by column name; the first row names the columns. Blank lines are skipped, text stays as it is.

    Raises:
        DataError: empty file, no rows, not UTF-8, or a header that names no columns or one twice.
    """
    text = _text(handle.read(), file)
    named = _SEPARATOR_LINE.match(text)  # a spreadsheet's own line, no row
    if named is not None:
        separator = named.group(1)
    records = iter(_records(text, separator))
    if named is not None:
        next(records)
    header_line, header, fault = next(records, (1, [], None))
    if fault is not None:
        raise DataError(f"{file}:{header_line}: {fault}")
    if not header:
        raise DataError(f"{file}: the file is empty. The first line names the columns, for example: prompt,completion")
    _check_header(header, f"{file}:{header_line}", separator)
    # Columns without a name (the index that pandas writes, an empty last column) get a name that says where they are.
    header = [name if name.strip() else nameless(number) for number, name in enumerate(header, start=1)]
    first = next(records, None)
    if first is None:
        raise DataError(
            f"{file}: the file has no rows, only the line that names the columns ({', '.join(header[:4])})."
        )
    for line, fields, fault in itertools.chain([first], records):
        if fault is not None:
            yield BadRow(fault, file, line, fatal=True)
            return
        if len(fields) != len(header):
            detail = f"{len(fields)} instead of {len(header)}; a text with {separator!r} or a line break needs quotes"
            yield BadRow(RowError("another number of fields than the header", detail), file, line)
            continue
        yield RawRow({name: _value(cell) for name, cell in zip(header, fields, strict=True)}, file, line)


def _value(cell: str) -> str | float:
    """A cell as it is; what pandas writes for a missing value is no text."""
    return math.nan if cell in ("nan", "NaN", "<NA>") else cell


def nameless(number: int) -> str:
    """What column ``number`` (from 1) is called when its file gives it no name."""
    return f"column {number} (no name)"


def _text(data: bytes, file: str) -> str:
    refuse_utf16(data, file)
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return decode(data, file)
    except RowError as fault:
        raise DataError(f"{file}:{line_of(data, first_bad_byte(data))}: {fault}") from None


def _check_header(header: list[str], where: str, separator: str) -> None:
    if len(header) == 1:
        for other, name in ((";", "semicolons"), ("\t", "tabs"), (",", "commas")):
            if other != separator and other in header[0]:
                raise DataError(f"{where}: the columns are separated by {name}. Save with commas, or tabs as .tsv.")
    if not any(name.strip() for name in header):
        raise DataError(f"{where}: no column has a name. The first line names the columns.")
    for name in filter(str.strip, header):
        if header.count(name) > 1:
            raise DataError(f"{where}: column {shorten(name)} is there twice. Each column needs a name of its own.")


def _records(text: str, separator: str) -> list[tuple[int, list[str], RowError | None]]:
    """(line, fields, error) of every record that is not a blank line; an error ends the file."""
    records: list[tuple[int, list[str], RowError | None]] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    # The limit of a field is one for the process (131,072 characters): raised for this file, and put back.
    limit = csv.field_size_limit()
    csv.field_size_limit(max(limit, len(text)))
    line = 1
    try:
        for fields in reader:
            if fields and (len(fields) > 1 or not fields[0].isspace()):
                records.append((line, fields, None))
            line = reader.line_num + 1
    except csv.Error:
        reason = "a quoted field is not closed, or text follows its quote"
        records.append((line, [], RowError(reason, 'write "" for a quote, and quotes around the field')))
    finally:
        csv.field_size_limit(limit)
    return records
