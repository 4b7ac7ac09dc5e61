"""A `Config` back to YAML, and the configuration's shape as JSON schema and as a page of documentation."""

from __future__ import annotations

import typing
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from frugal.config.models import Config, SourceSection
from frugal.config.yaml import Plain, core_value


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "'" if not isinstance(core_value(Plain(text)), str) or text == "<<" else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_yaml(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load_config` of it gives an equal Config."""
    return yaml.dump(
        config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )


def config_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, short forms included, for editors that complete and check YAML."""
    schema = Config.model_json_schema()
    source = {"$ref": "#/$defs/SourceSection"}
    entry = {"anyOf": [{"type": "string"}, source]}
    data = schema["$defs"]["DataSection"]["properties"]
    for key in ("train", "eval"):
        data[key] = {**data[key], "anyOf": [*entry["anyOf"], {"type": "array", "items": entry}]}
        data[key].pop("type", None)
        data[key].pop("items", None)
    for model in ("LoraSection", "OutputSection", "ModelSection", "TrainSection"):
        for key, value in schema["$defs"][model]["properties"].items():
            if value.get("type") == "array":
                one = value.pop("items")
                del value["type"]
                schema["$defs"][model]["properties"][key] = {**value, "anyOf": [one, {"type": "array", "items": one}]}
    schema["patternProperties"] = {"^x-": {}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def config_page() -> str:
    """docs/config.md: every key with its type, default and documentation."""
    parts = [_INTRODUCTION]
    for name, info in Config.model_fields.items():
        section = info.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        parts.append(f"## {name}\n\n{_table(section)}")
        if name == "data":
            parts.append(f"### A source: an entry of data.train or data.eval\n\n{_table(SourceSection)}")
    return "\n\n".join(parts) + "\n"


def _table(section: type[BaseModel]) -> str:
    rows = ["| key | allowed | default | |", "| --- | --- | --- | --- |"]
    for name, info in section.model_fields.items():
        about = (info.description or "").replace("|", "\\|").replace("\n", " ")
        rows.append(f"| `{name}` | {_allowed(info)} | {_default(info)} | {about} |")
    return "\n".join(rows)


def _allowed(info: FieldInfo) -> str:
    words = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in info.metadata
        for name, sign in words.items()
        if getattr(item, name, None) is not None
    ]
    return ", ".join([_type(info.annotation), *bounds]).replace("|", "\\|")


def _type(annotation: Any) -> str:
    names = {str: "text", int: "whole number", float: "number", bool: "true, false", type(None): "nothing"}
    arguments = typing.get_args(annotation)
    if annotation in names:
        return names[annotation]
    if annotation is SourceSection:
        return "source"
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"table name: {_type(arguments[1])}"
    return " or ".join(_type(argument) for argument in arguments if argument is not type(None))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    if value is None or value == []:
        return "none" if value is None else "`[]`"
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
- **Whole numbers with a leading zero are refused** (`010`): some readers take them as octal. Write `10`, or `0o10` for
  octal.
- **A key given twice is an error.** Merge keys (`<<: *anchor`) are allowed; what is written beside them wins.
- **Keys of your own** go to the top level and start with `x-`. They are left alone, and are the place for YAML anchors.
- **One value where a list is meant** becomes a list of one. `q_proj,v_proj` as one text is refused: write
  `[q_proj, v_proj]`.
- **Data in short**: `train: rows.jsonl` and `train: [a.jsonl, b.csv]` stand for sources with only a `path`.
- **Relative paths** are meant from the current directory, not from the configuration's folder.
- **Overrides**: what follows `=` is one plain value, or YAML when it starts with `[`, `{` or a quote. Entries of a list
  are numbered from 0: `data.train.0.weight=0.5`. An override given twice with different values is an error."""
