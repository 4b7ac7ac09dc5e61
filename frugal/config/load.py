"""A YAML file or a dict, and overrides, to a checked `Config`; every fault in one message, with its line."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frugal.config import checks, coerce
from frugal.config.foreign import THE_KEYS, explain_unknown, leaves
from frugal.config.models import Config, SourceSection
from frugal.config.yaml import Document, Fault, Path, Plain, YamlError, is_null, parse, show_path
from frugal.errors import ConfigError

DICT_FIELDS = {("lora", "rank_pattern"), ("lora", "alpha_pattern")}  # below these, dots are part of the name
_OUT_OF_RANGE = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


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


def read_file(path: pathlib.Path) -> Document:
    """The tree of a YAML file with its lines; ConfigError when there is no such tree."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `frugal configs list` shows ready ones{_nearby(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder, not a YAML file{_inside(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})") from None
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
    if document.tree is None or is_null(document.tree):
        raise ConfigError(f"{path}: the file is empty. It needs at least model.base, data.train and output.dir")
    if not isinstance(document.tree, dict):
        kind = "a list" if isinstance(document.tree, list) else f"the text {coerce.got(document.tree)}"
        keys = ", ".join(Config.model_fields)
        raise ConfigError(f"{path}: line 1: got {kind} at the top; sections are meant: {keys}")
    return document


def _nearby(path: pathlib.Path) -> str:
    names = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _inside(path: pathlib.Path) -> str:
    names = sorted(entry.name for entry in path.glob("*.y*ml"))[:5]
    return f". In it: {', '.join(names)}" if names else ""


class _Loader:
    """One loading: what was read, where each value came from, and the faults so far."""

    def __init__(self, name: str, document: Document) -> None:
        self.name = name
        self.tree: dict[str, Any] = document.tree
        self.faults: list[Fault] = list(document.faults)
        self.origins: dict[Path, tuple[str, int]] = {p: (f"line {n}", n) for p, n in document.lines.items()}

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

    def unknown(self, path: Path, key: str, value: Any, model: type[BaseModel]) -> None:
        self.report((*path, key), explain_unknown(show_path(path), key, model))

    def load(self, overrides: Sequence[str]) -> Config:
        self.override(overrides)
        values = coerce.section(Config, self.tree, (), self.report, self.unknown)
        config = self.validate(values)
        self.cross_check(values)
        if self.faults or config is None:
            raise ConfigError(self.message())
        return config

    def override(self, overrides: Sequence[str]) -> None:
        seen: dict[str, str] = {}
        for text in overrides:
            key, equals, value = text.partition("=")
            key = key.strip().removeprefix("--")
            if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
                self.faults.append(Fault((), "holds bytes that are not UTF-8", f"override {text!a}"))
                continue
            if not equals or not key:
                known = ", ".join(f"{place}=VALUE" for place in leaves().get(key, []) if "." in place)
                wanted = f"write {known}" if known else "neither an option nor key.sub=value"
                self.faults.append(Fault((), wanted, f"override {text!r}"))
                continue
            if seen.setdefault(key, value) != value:
                self.faults.append(Fault((key,), "given twice with different values; keep one", f"override {text}"))
                continue
            try:
                self.put(key.split("."), _override_value(value), f"override {text}")
            except (YamlError, _NoPlace) as error:
                self.faults.append(Fault(tuple(key.split(".")), str(error), f"override {text}"))

    def put(self, parts: list[str], value: Any, origin: str) -> None:
        """Set one value in the tree, making sections on the way; list entries are named by number from 0."""
        path: Path = ()
        here: Any = self.tree
        for index, part in enumerate(parts[:-1]):
            if path in DICT_FIELDS:
                parts = [*parts[:index], ".".join(parts[index:])]
                break
            here, path = self.step(here, path, part)
        here, path = self.step(here, path, parts[-1], value)
        self.origins = {p: o for p, o in self.origins.items() if p[: len(path)] != path}
        self.origins[path] = (origin, 0)

    def step(self, here: Any, path: Path, part: str, value: Any = coerce.MISSING) -> tuple[Any, Path]:
        setting = value is not coerce.MISSING
        if path in (("data", "train"), ("data", "eval")):
            if not part.isdigit():
                raise _NoPlace(f"name the source by its number, from 0: {show_path(path)}.0.{part}")
            here = self.as_sources(here, path)
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise _NoPlace(f"{show_path(path)} has {len(here)} entries, numbered from 0")
            number = int(part)
            if setting:
                here[number] = value
            elif isinstance(here[number], str):
                here[number] = {"path": here[number]}
            return here[number], (*path, number)
        if not isinstance(here, dict):
            raise _NoPlace(f"{show_path(path)} is one value and has no keys below it")
        if setting:
            here[part] = value
        elif is_null(here.get(part)):
            here[part] = {}
        return here[part], (*path, part)

    def as_sources(self, here: Any, path: Path) -> Any:
        """`data.train: file.jsonl` or one source as the list it stands for, so that `data.train.0.x` has a place."""
        if isinstance(here, str) or (isinstance(here, dict) and here):
            here = [here]
            parent = self.tree["data"]
            parent[path[-1]] = here
        return here

    def validate(self, values: Any) -> Config | None:
        """Ranges and missing keys, as pydantic finds them; nothing about keys that already have a fault."""
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            known = {fault.path for fault in self.faults}
            for detail in error.errors():
                path: Path = tuple(detail["loc"])
                if any(path[: len(other)] == other or other[: len(path)] == path for other in known if other):
                    continue
                self.report(path, _describe(path, detail))
            return None

    def cross_check(self, values: Any) -> None:
        wrong = {show_path(fault.path[:2]) for fault in self.faults} | {
            show_path(fault.path[:1]) for fault in self.faults
        }
        flat: dict[str, Any] = {}
        changed = set()
        for name, info in Config.model_fields.items():
            section = info.annotation
            assert isinstance(section, type)
            assert issubclass(section, BaseModel)
            given = values.get(name, {}) if isinstance(values, dict) else {}
            for leaf, leaf_info in section.model_fields.items():
                key = f"{name}.{leaf}"
                if not leaf_info.is_required():
                    flat[key] = leaf_info.get_default(call_default_factory=True)
                if leaf in given:
                    if flat.get(key) != given[leaf]:
                        changed.add(key)
                    flat[key] = given[leaf]
        seen = checks.Values(flat, frozenset(changed))
        for rule in checks.RULES:
            usable = all(key in flat and key not in wrong and key.split(".")[0] not in wrong for key in rule.keys)
            if usable and (message := rule.check(seen)):
                self.report(tuple(rule.keys[0].split(".")), message)

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


class _NoPlace(Exception):
    """An override whose key cannot be reached."""


def _override_value(text: str) -> Any:
    """What stands right of `=`: YAML when it starts with `[`, `{` or a quote, else one plain value."""
    text = text.strip()
    if text[:1] in ("[", "{", "'", '"'):
        document = parse(text)
        if document.faults:
            raise YamlError(document.faults[0].message)
        return document.tree
    return Plain(text)


def _describe(path: Path, detail: ErrorDetails) -> str:
    """pydantic's finding in the words of the other messages."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        about = _documentation(path)
        return "is missing and has no default" + (f". {about}" if about else "")
    if kind in _OUT_OF_RANGE:
        name, words = _OUT_OF_RANGE[kind]
        return f"got {detail['input']:g}; allowed: {words} {context[name]:g}{_other_bound(path, name)}"
    if kind == "string_pattern_mismatch":
        return f"got {coerce.got(detail['input'])}; meant is: {_documentation(path)}"
    return f"got {coerce.got(detail['input'])}; {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _field(path: Path) -> Any:
    model: Any = SourceSection if path[:2] in (("data", "train"), ("data", "eval")) and len(path) > 2 else None
    if model is None and len(path) > 1:
        model = Config.model_fields[str(path[0])].annotation
    return (model or Config).model_fields.get(str(path[-1]))


def _documentation(path: Path) -> str:
    if len(path) == 1:
        section = Config.model_fields[str(path[0])].annotation
        assert section is not None
        needed = [name for name, info in section.model_fields.items() if info.is_required()]
        return "It needs " + " and ".join(f"{path[0]}.{name}" for name in needed)
    info = _field(path)
    return str(info.description or "") if info else ""


def _other_bound(path: Path, name: str) -> str:
    info = _field(path)
    found: dict[str, float] = {}
    for item in getattr(info, "metadata", []):
        if dataclasses.is_dataclass(item):
            found |= {k: getattr(item, k) for k in ("gt", "ge", "lt", "le") if getattr(item, k, None) is not None}
    words = dict(_OUT_OF_RANGE.values())
    return "".join(f" and {words[k]} {v:g}" for k, v in found.items() if k != name)
