"""Files that are whole or absent: write beside, fsync, rename. UTF-8 everywhere, whatever the locale says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from frugal.errors import CheckpointError, ModelError


def fsync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` durable. Some file systems cannot fsync a folder; POSIX ones can."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Flush the content of a file that another library wrote."""
    with open(path, "rb+") as handle:
        os.fsync(handle.fileno())


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it replaces ``path``, on any error it is removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield beside
        fsync_file(beside)
        os.replace(beside, path)
        fsync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: UTF-8, keys in the order given, a final newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a UTF-8 JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


_UNDEFINED_IN_1252 = frozenset((0x81, 0x8D, 0x8F, 0x90, 0x9D))


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 when a file begins as they do, with or without a byte order mark."""
    if head[:4] in (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"):
        return "UTF-32"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    if len(head) > 3 and not any(head[1:64:2]) and all(head[:64:2]):
        return "UTF-16LE"
    if len(head) > 3 and not any(head[:64:2]) and all(head[1:64:2]):
        return "UTF-16BE"
    return None


def about_encoding(error: UnicodeDecodeError, file: str, offset: int = 0) -> str:
    """Which byte is not UTF-8, the probable encoding of the text, and the command that converts the file.

    ``offset``: where the text that was read begins in the file.
    """
    data = error.object
    place = error.start - max(data.rfind(b"\n", 0, error.start), data.rfind(b"\r", 0, error.start))
    likely = "ISO-8859-1" if {byte for byte in data if byte >= 0x80} & _UNDEFINED_IN_1252 else "WINDOWS-1252"
    return (
        f"byte 0x{data[error.start]:02x}, byte {place} of the line, offset {offset + error.start:,} of the file; "
        f"probably {likely}. {convert(file, likely)}"
    )


def convert(file: str, encoding: str) -> str:
    """The sentence with the command that makes a file UTF-8."""
    return f"Save it as UTF-8, for example: iconv -f {encoding} -t UTF-8 {shlex.quote(file)} > converted"


def inside(folder: Path, name: object, *, named_in: str) -> Path:
    """The file of ``folder`` that another file names; nothing is opened.

    The hub cache's snapshots are links into the `blobs` beside them: those count as inside.

    Args:
        named_in: where the name stands, for the message.

    Raises:
        ModelError: the name is no text, absolute, leads out of the folder by itself or through a link.
    """
    folder = Path(folder)
    text = name if isinstance(name, str) else ""
    parts = PureWindowsPath(text).parts  # both kinds of separators
    absolute = PurePosixPath(text).is_absolute() or bool(PureWindowsPath(text).anchor)
    if not text.strip() or "\0" in text or absolute or ".." in parts:
        raise ModelError(f"{named_in} names the file {name!r}: it must be a name inside {folder}.")
    path = folder / text
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(each) for each in allowed):
        raise ModelError(
            f"{path}, named in {named_in}, leads to {path.resolve()}, outside the folder. Copy the file into it."
        )
    return path


def run_folder(path: str | Path) -> Path:
    """The folder that a user named as a run. Here, where nothing heavy is imported, so that a mistake is told at once.

    Raises:
        CheckpointError: it does not exist, or is a file.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file. Give the folder of a run (output.dir in a configuration) instead.")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist. Give the folder of a run (output.dir) or of an adapter.")
    return folder


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, as lower-case hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
