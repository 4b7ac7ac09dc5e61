"""A YAML file or a dict, and overrides, to a checked `Config`; every fault in one message, with its line."""

from __future__ import annotations

import copy
import difflib
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from frugal.config.conflicts import conflicts
from frugal.config.fields import describe, got
from frugal.config.schema import Config, SourceSection, sections
from frugal.config.unknown_keys import THE_KEYS, explain_unknown, leaves
from frugal.config.yaml import NULL, Document, Fault, Path, YamlError, dump, parse
from frugal.errors import ConfigError
from frugal.files import about_encoding, convert, wide_encoding

_SOURCES = (("data", "train"), ("data", "eval"))
_PATTERNS = (["lora", "rank_pattern"], ["lora", "alpha_pattern"])  # below these, dots are part of the name


def load_config(source: str | os.PathLike[str] | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration.

    Args:
        source: path of a YAML file, a dict of the same shape, or a Config to change.
        overrides: `key.sub=value` texts, as on the command line; they win over the file.

    Raises:
        ConfigError: the file is missing or not YAML, or with ALL faults of it and of the overrides: key, line, what
            was got, what is allowed, and the nearest known key.

    Relative paths in a configuration are meant from the current directory, as on the command line.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(source, (str, os.PathLike)):
        name, document = os.fspath(source), read_file(pathlib.Path(source))
    else:
        tree = source.model_dump(exclude_unset=True) if isinstance(source, Config) else copy.deepcopy(dict(source))
        name, document = "configuration", Document(tree)
    return _Loader(name, document).load(overrides)


def dump_yaml(config: Config, comments: Mapping[str, str] | None = None) -> str:
    """Write the whole configuration as YAML, defaults included; `load_config` of it gives an equal Config.

    ``comments``: by dotted key of a section's plain value, what to write beside it.
    """
    lines, section = [], ""
    for line in dump(config.model_dump()).splitlines():
        if found := re.match(r"(\w+):", line):
            section = found[1]
        elif comments and (found := re.match(r"  (\w+): ", line)) and (text := comments.get(f"{section}.{found[1]}")):
            line = f"{line}  # {' '.join(text.split())}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def read_file(path: pathlib.Path) -> Document:
    """Read the tree of a YAML file with its lines; ConfigError when there is no such tree."""
    try:
        data = path.read_bytes()
        if (wide := wide_encoding(data[:64])) is not None:
            raise ConfigError(
                f"{path}: not UTF-8 text but {wide} (seen from its first bytes, offset 0). {convert(str(path), wide)}"
            )
        text = data.decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `frugal configs list` shows ready ones{_nearby(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder, not a YAML file{_inside(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        about = about_encoding(error, str(path))
        raise ConfigError(f"{path}: line {line}: not UTF-8 text ({about})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{str(path)!a}: this process names files in {error.encoding}, which lacks letters of that path. "
            "Start Python with -X utf8, or under a UTF-8 locale (LC_ALL=C.UTF-8)"
        ) from None
    try:
        document = parse(text)
    except YamlError as error:
        if path.suffix.lower() in (".jsonl", ".ndjson", ".csv", ".tsv", ".txt"):
            raise ConfigError(f"{path}: rows, not a configuration; name it as data.train in a YAML file") from None
        raise ConfigError(f"{path}: {error}") from None
    if document.tree is None:
        raise ConfigError(f"{path}: the file is empty. It needs at least model.base, data.train and output.dir")
    if not isinstance(document.tree, dict):
        keys = ", ".join(Config.model_fields)
        raise ConfigError(f"{path}: line 1: expected sections ({keys}), got {got(document.tree)} at the top")
    return document


def _nearby(path: pathlib.Path) -> str:
    names = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    stems = {pathlib.Path(name).stem: name for name in names}  # suffixes are alike in all of them
    near = difflib.get_close_matches(path.stem, stems, n=1)
    return f"; did you mean {path.with_name(stems[near[0]])}?" if near else ""


def _inside(path: pathlib.Path) -> str:
    names = sorted(entry.name for entry in path.glob("*.y*ml"))[:5]
    return f". In it: {', '.join(names)}" if names else ""


class _Loader:
    """One loading: what was read, the origin of each value, and the faults so far."""

    def __init__(self, name: str, document: Document) -> None:
        self.name = name
        self.tree: dict[str, Any] = document.tree
        self.faults: list[Fault] = list(document.faults)
        self.origins: dict[Path, tuple[str, int]] = {p: (f"line {n}", n) for p, n in document.lines.items()}

    def load(self, overrides: Sequence[str]) -> Config:
        self.override(overrides)
        config = self.validate({key: value for key, value in self.tree.items() if not str(key).startswith("x-")})
        wrong = {show_path(fault.path[:2]) for fault in self.faults}
        for keys, message in conflicts(config):
            if wrong.isdisjoint([*keys, *(key.split(".")[0] for key in keys)]):
                self.report(tuple(keys[0].split(".")), message)
        if self.faults:
            raise ConfigError(self.message())
        return config

    def report(self, path: Path, message: str) -> None:
        """Add a fault at `path`, with the origin of the nearest part of it that has one."""
        origin, line = "", 0
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                origin, line = self.origins[path[:length]]
                break
        else:  # a section that only an override made
            origin, line = next((o for p, o in self.origins.items() if path and p[: len(path)] == path), ("", 0))
        self.faults.append(Fault(path, message, origin, line))

    def override(self, overrides: Sequence[str]) -> None:
        seen: dict[str, str] = {}
        for text in overrides:
            key, equals, value = text.partition("=")
            key = key.strip().removeprefix("--")
            if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
                self.faults.append(Fault((), "must be UTF-8 text", f"override {text!a}"))
                continue
            if not equals or not key:
                known = ", ".join(f"{place}=VALUE" for place in leaves().get(key, []) if "." in place)
                message = f"write {known}" if known else "neither an option nor key.sub=value"
                self.faults.append(Fault((), message, f"override {text!r}"))
                continue
            if seen.setdefault(key, value) != value:
                self.faults.append(Fault((key,), "given twice with different values; keep one", f"override {text}"))
                continue
            try:
                self.put(key.split("."), _override_value(value), f"override {text}")
            except (YamlError, _NoSuchKey) as error:
                self.faults.append(Fault(tuple(key.split(".")), str(error), f"override {text}"))

    def put(self, parts: list[str], value: Any, origin: str) -> None:
        """Set one value in the tree, making sections on the way; list entries are named by number from 0."""
        if parts[:2] in _PATTERNS and len(parts) > 2:
            parts = [*parts[:2], ".".join(parts[2:])]
        here: Any = self.tree
        path: Path = ()
        for part, following in itertools.zip_longest(parts, parts[1:]):
            step: Any = part
            if isinstance(here, list):
                if path in _SOURCES and not part.isdigit():
                    raise _NoSuchKey(f"name the source by its number, from 0: {show_path(path)}.0.{part}")
                if not part.isdigit() or int(part) >= len(here):
                    raise _NoSuchKey(f"{show_path(path)} has {len(here)} entries, numbered from 0")
                step = int(part)
            elif not isinstance(here, dict):
                raise _NoSuchKey(f"{show_path(path)} is one value and has no keys below it")
            path = (*path, step)
            if following is None:
                here[step] = value
            else:
                here[step] = _with_room(here[step] if isinstance(here, list) else here.get(step), path)
                here = here[step]
        self.origins = {p: o for p, o in self.origins.items() if p[: len(path)] != path}
        self.origins[path] = (origin, 0)

    def validate(self, tree: dict[str, Any]) -> Config:
        """Report what pydantic finds, but nothing about keys that already have a fault. Returns a Config without the
        wrong keys, for checks of the others."""
        try:
            return Config.model_validate(tree)
        except ValidationError as error:
            details = error.errors(include_url=False)
        known = [fault.path for fault in self.faults if fault.path]
        for detail in details:
            path: Path = detail["loc"]
            if not any(path[: len(other)] == other for other in known):
                self.report(path, _describe(path, detail))
        return Config.model_validate(_without(tree, [detail["loc"] for detail in details]))

    def message(self) -> str:
        faults = sorted(dict.fromkeys(self.faults), key=lambda fault: (fault.line == 0, fault.line))
        lines = []
        listed: set[str] = set()
        for fault in faults:
            where = f"{fault.origin}: " if fault.origin else ""
            shown = show_path(fault.path)
            key = f"{shown}: " if shown and f"override {shown}=" not in where else ""
            what, mark, known = fault.message.partition(THE_KEYS)
            lines.append(f"{where}{key}{what}" + ("" if known in listed else mark + known))
            listed.add(known)
        if len(lines) == 1:
            return f"{self.name}: {lines[0]}"
        return f"{self.name}: {len(lines)} faults\n" + "\n".join(f"  {line}" for line in lines)


class _NoSuchKey(Exception):
    """An override whose key cannot be reached."""


def show_path(path: Path) -> str:
    """Write a path as messages do: `data.train[0].path`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _with_room(value: Any, path: Path) -> Any:
    """What an override's next key goes into: short forms of sources in full, a missing section as an empty one."""
    if path in _SOURCES:
        return value if isinstance(value, (list, tuple)) else [value] if value else []
    if path[:-1] in _SOURCES and isinstance(value, (str, os.PathLike)):
        return {"path": value}
    return {} if value is None else value


def _override_value(text: str) -> Any:
    """Read the right of `=`: YAML when it starts with `[`, `{` or a quote, else one plain value."""
    text = text.strip()
    if text[:1] in ("[", "{", "'", '"'):
        document = parse(text)
        if document.faults:
            raise YamlError(document.faults[0].message)
        return document.tree
    return None if text in NULL else text


def _without(tree: dict[str, Any], wrong: Iterable[Path]) -> dict[str, Any]:
    """The tree without wrong keys, and with something in the place of required ones."""
    result = {key: {**value} if isinstance(value, dict) else value for key, value in tree.items() if key in sections()}
    for path in wrong:
        section = result.get(str(path[0]))
        if len(path) > 1 and isinstance(section, dict):
            section.pop(path[1], None)
        else:
            result.pop(str(path[0]), None)
    for section_name, key in (("model", "base"), ("data", "train"), ("output", "dir")):
        section = result.get(section_name)
        if section is None or isinstance(section, dict):
            result[section_name] = {key: "-"} | {k: v for k, v in (section or {}).items() if isinstance(k, str)}
    return result


def _describe(path: Path, detail: ErrorDetails) -> str:
    """Say what is wrong at `path`: a key that does not exist, a section that is missing, or a field's value."""
    depth = 3 if path[:2] in _SOURCES and len(path) > 2 else min(len(path) - 1, 1)
    model = (Config, sections().get(str(path[0]), Config), None, SourceSection)[depth]
    assert model is not None
    if detail["type"] == "extra_forbidden":
        return explain_unknown(show_path(path[:-1]), str(path[-1]), model)
    if detail["type"] == "invalid_key":
        return f"the key {path[-1]!r} must be text"
    if detail["type"] == "missing" and depth == 0:
        needed = [key for key, info in sections()[str(path[0])].model_fields.items() if info.is_required()]
        return "is missing and has no default. It needs " + " and ".join(f"{path[0]}.{key}" for key in needed)
    info = model.model_fields[str(path[depth])] if len(path) > depth else None
    annotation: Any = info.annotation if info else None
    for _ in path[depth + 1 :]:  # an entry of a list or of a table
        annotation = get_args(annotation)[-1]
    return describe(detail, annotation, info)
