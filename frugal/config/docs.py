"""The configuration's shape as JSON schema and as a page of documentation."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from frugal.config.fields import allowed
from frugal.config.schema import Config, Section, SourceSection, sections


def config_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, short forms included, for editors that complete and check YAML."""
    schema = Config.model_json_schema()
    schema["patternProperties"] = {"^x-": {}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def config_page() -> str:
    """Write docs/config.md: every key with its type, default and documentation."""
    parts = [_INTRODUCTION]
    for name, section in sections().items():
        parts.append(f"## {name}\n\n{_table(section)}")
        if name == "data":
            parts.append(f"### A source: an entry of data.train or data.eval\n\n{_table(SourceSection)}")
    return "\n\n".join(parts) + "\n"


def _table(section: type[Section]) -> str:
    rows = ["| key | allowed | default | |", "| --- | --- | --- | --- |"]
    for name, info in section.model_fields.items():
        about = " ".join((info.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {allowed(info.annotation, info)} | {_default(info)} | {about} |")
    return "\n".join(rows)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


_INTRODUCTION = """\
# The configuration file

This page is made from the code (`frugal schema --markdown`). `frugal schema` prints the same as JSON schema, for
editors.

A configuration is one YAML file with the sections below. `frugal train CONFIG key.sub=value ...` overrides keys.

- **All faults come in one message**, each with its line, what was got, what is allowed, and the nearest known key. The
  exit code is 2 and nothing has been written.
- **YAML is read by version 1.2's rules**: `1e-4` is a number, `no` and `off` are text, `12:30` is text. The field
  decides: in a text field every plain word is text (`revision: 1e5`), in a number field a quoted number is a number, in
  a true/false field `"false"` is false.
- **Whole numbers with a leading zero are refused** (`010`): some readers take them as octal.
- **A key given twice is an error.** Merge keys (`<<: *anchor`) are allowed; what is written beside them wins.
- **Keys of your own** go to the top level and start with `x-`. They are left alone, and are the place for YAML anchors.
- **One value where a list is meant** becomes a list of one. `q_proj,v_proj` as one text is refused: write
  `[q_proj, v_proj]`.
- **Data in short**: `train: rows.jsonl` and `train: [a.jsonl, b.csv]` stand for sources with only a `path`.
- **Relative paths** are meant from the current directory, not from the configuration's folder.
- **Overrides**: what follows `=` is one plain value, or YAML when it starts with `[`, `{` or a quote. Entries of a list
  are numbered from 0: `data.train.0.weight=0.5`. An override given twice with different values is an error."""
