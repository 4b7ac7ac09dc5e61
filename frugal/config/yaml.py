"""YAML with the line of every key and YAML 1.2's core rules: `no` is text, a key given twice is an error.

Scalars stay text (an unquoted `null` is None): the field they belong to decides what they mean (see fields.py), so
`revision: 1e5` stays the text that was written, and `learning_rate: 1e5` is a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the tree: ("data", "train", 0, "path")."""

MAX_NODES = 100_000  # aliases of aliases can make a small file explode


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
    """What a file says: dicts, lists, text and None, with the line of each key and list entry."""

    tree: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    """Faults that leave the rest readable, such as a key given twice."""


class YamlError(Exception):
    """The text cannot be read as YAML at all. The message carries the line."""


NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"([-+]?)0+([0-9]+)")


def read_bool(text: str) -> bool | None:
    """Read YAML 1.2's booleans; None when the text is none of them."""
    return _BOOL.get(text.strip())


def read_number(text: str) -> int | float | None:
    """Read a number by YAML 1.2's core rules; None when the text is not one.

    Raises:
        ValueError: `010` (8 to some readers, 10 to others) or an infinity: what must be, and what to write.
    """
    text = text.strip()
    if zeros := _LEADING_ZERO.fullmatch(text):
        raise ValueError("must not start with a zero", f"write {zeros[1]}{zeros[2]}")
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    number = float(text) if _FLOAT.fullmatch(text) else None
    if number == float("inf") or number == -float("inf") or _NOT_FINITE.fullmatch(text):
        raise ValueError("must be a finite number")
    return number


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
        if 0 < candidate <= len(lines) and re.match(r"\s*\t", lines[candidate - 1]):
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
            return None
        if isinstance(node, yaml.ScalarNode):
            return None if node.style is None and node.value in NULL else str(node.value)
        self.open.append(node)
        result: Any
        if isinstance(node, yaml.SequenceNode):
            result = [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        else:
            result = self.mapping(node, path)
        self.open.pop()
        return result

    def mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """A mapping; keys that `<<: *anchor` brings count where they are not given (of several, the first wins)."""
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        merges: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.fault(path, key_node, "a key must be one word, not a list or a section")
                continue
            key, here = str(key_node.value), (*path, str(key_node.value))
            if key == "<<" and key_node.style is None:
                merges += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            elif key in first:
                self.fault(here, key_node, f"given twice: in line {first[key]} and again in line {line}; keep one")
            else:
                first[key] = self.document.lines[here] = line
                result[key] = self.value(value_node, here)
        for merge in merges:
            if not isinstance(merge, yaml.MappingNode):
                self.fault(path, merge, "`<<` must be an anchor of a section, for example `<<: *defaults`")
                continue
            kept = {place: line for place, line in self.document.lines.items() if place[: len(path)] == path}
            result = self.value(merge, path) | result
            self.document.lines.update(kept)
        return result


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    number = any(pattern.fullmatch(text) for pattern in (_INT, _FLOAT, _NOT_FINITE))
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if number else None)


_Dumper.add_representer(str, _represent_text)


def dump(tree: Any) -> str:
    """Write plain values as YAML that `parse` and readers of YAML 1.1 read alike."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)
