"""YAML with line numbers and YAML 1.2's core rules: 1e-4 is a number, `no` is text, a key given twice is an error.

A plain scalar is kept as its source text (`Plain`): the field it belongs to decides what it means (see coerce.py), so
`revision: 1e5` stays the text that was written, and `learning_rate: 1e5` is a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Where a value stands in the tree: ("data", "train", 0, "path")."""

MAX_NODES = 100_000  # aliases of aliases can make a small file explode


class Plain(str):
    """A scalar written without quotes, as in the file. `null`, `true` and numbers are still text here."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, where it was written, and what would be right."""

    path: Path
    message: str
    origin: str = ""
    """`line 4`, or `override train.max_steps=x`; empty for values that came from Python."""
    line: int = 0
    """For sorting; 0 for overrides and for values that came from Python."""


@dataclass(slots=True)
class Document:
    """What a file says: dicts, lists, `Plain` and quoted text, with the line of each key and list entry."""

    tree: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    """Faults that leave the rest readable, such as a key given twice."""


class YamlError(Exception):
    """The text cannot be read as YAML at all. The message carries the line."""


def show_path(path: Path) -> str:
    """`data.train[0].path`, as messages write it."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


def is_null(value: Any) -> bool:
    """True for None and for an unquoted `null`, `~` or nothing."""
    return value is None or (isinstance(value, Plain) and value in _NULL)


def read_bool(text: str) -> bool | None:
    """YAML 1.2's booleans, quoted or not; None when the text is none of them."""
    return _BOOL.get(text.strip())


def read_number(text: str) -> int | float | None:
    """A number by YAML 1.2's core rules, quoted or not; None when the text is not one.

    Raises:
        ValueError: `010` (8 to some readers, 10 to others) and infinities, with a message that says what to write.
    """
    text = text.strip()
    if _LEADING_ZERO.fullmatch(text):
        plain, sign = text.lstrip("+-0") or "0", "-" if text.startswith("-") else ""
        raise ValueError(
            f"starts with a zero, which some YAML readers take as octal: write {sign}{plain}, or 0o{plain} for octal"
        )
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("is not a finite number")
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError("is too large for a number")
        return number
    return None


def core_value(value: str) -> Any:
    """What a plain scalar means where no field says otherwise: null, true/false, a number, else its text."""
    if not isinstance(value, Plain):
        return value
    if value in _NULL:
        return None
    if value in _BOOL:
        return _BOOL[value]
    try:
        number = read_number(value)
    except ValueError:
        number = None
    return str(value) if number is None else number


def parse(text: str) -> Document:
    """Read one YAML document.

    Raises:
        YamlError: the text is not YAML, or not one document; says the line and, for tabs, what to do.
    """
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_explain(text, error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: the character {error.character!r} is not allowed in YAML") from None
    except RecursionError:
        raise YamlError("the text is nested too deeply") from None
    document = Document()
    if node is not None:
        document.tree = _Builder(document).value(node, ())
    return document


def _explain(text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    number = mark.line + 1 if mark else 0
    lines = text.splitlines()
    for candidate in (number, number - 1):
        if 0 < candidate <= len(lines):
            line = lines[candidate - 1]
            if "\t" in line[: len(line) - len(line.lstrip())]:
                return f"line {candidate}: indented with a tab; YAML wants spaces (two per level)"
    if isinstance(error, yaml.composer.ComposerError) and "single document" in str(error.context):
        return f"line {number}: a second document starts here (`---`); a config is one document"
    problem = error.problem or "not YAML"
    if problem.startswith("mapping values are not allowed"):
        problem = "a `:` in an unexpected place (wrong indentation above, or text with `: ` that needs quotes)"
    elif "could not find expected ':'" in problem:
        problem = "a key without `:`, or a line indented differently from its neighbours"
    elif problem.startswith("expected <block end>"):
        problem = "indented differently from the lines of the same section"
    context = f" ({error.context})" if error.context and "block" not in error.context else ""
    return f"line {number}: {problem}{context}"


class _Builder:
    """Nodes to plain values, noting the line of every key and entry on the way."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.open: list[yaml.Node] = []
        self.count = 0

    def fault(self, path: Path, node: yaml.Node, message: str) -> None:
        line = node.start_mark.line + 1
        self.document.faults.append(Fault(path, message, f"line {line}", line))

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise YamlError(f"more than {MAX_NODES} values once aliases are followed")
        if any(node is other for other in self.open):
            raise YamlError(f"line {node.start_mark.line + 1}: an anchor that contains itself")
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        if node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
            self.fault(path, node, f"the tag {node.tag!r} is not read: write the value without it")
            return Plain("")
        self.open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            assert isinstance(node, yaml.ScalarNode)
            return Plain(node.value) if node.style is None else str(node.value)
        finally:
            self.open.pop()

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        merges: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.fault(path, key_node, "a key must be one word, not a list or a section")
                continue
            key = str(key_node.value)
            if key == "<<" and key_node.style is None:
                merges.append(value_node)
                continue
            here = (*path, key)
            if key in first:
                self.fault(here, key_node, f"given twice: in line {first[key]} and again in line {line}; keep one")
                continue
            first[key] = line
            self.document.lines[here] = line
            result[key] = self.value(value_node, here)
        for merge in merges:
            self.merge(merge, path, result)
        return result

    def merge(self, node: yaml.Node, path: Path, result: dict[str, Any]) -> None:
        """`<<: *anchor`: keys that are not given here come from the anchor; of several anchors the first wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self.fault(path, source, "`<<` takes an anchor of a section, for example `<<: *defaults`")
                continue
            kept = {p: n for p, n in self.document.lines.items() if p[: len(path)] == path}
            for key, value in self.value(source, path).items():
                result.setdefault(key, value)
            self.document.lines.update(kept)
