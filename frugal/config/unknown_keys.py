"""What to write instead of a key that does not exist: the nearest key, or what replaces another tool's key."""

from __future__ import annotations

import difflib
import functools
from importlib.resources import files

import yaml
from pydantic import BaseModel

from frugal.config.schema import Config, DataSection, SourceSection, sections

THE_KEYS = "; its keys are "
"""What the list of a section's keys begins with; a message gives each list once."""


@functools.cache
def foreign_keys() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Read foreign_keys.yaml: another tool's key -> the key here, -> what to do instead, -> what else differs."""
    data = yaml.safe_load(files("frugal.config").joinpath("foreign_keys.yaml").read_text(encoding="utf-8"))
    renamed, instead, differs = ({name: ours for ours, names in data[part].items() for name in names} for part in data)
    return renamed, instead, differs


@functools.cache
def leaves() -> dict[str, list[str]]:
    """Every key of the configuration: its last word -> its full names, sections included."""
    places: dict[str, list[str]] = {}
    for name, section in sections().items():
        places.setdefault(name, []).append(name)
        for leaf in section.model_fields:
            places.setdefault(leaf, []).append(f"{name}.{leaf}")
    for leaf in SourceSection.model_fields:
        places.setdefault(leaf, []).append(f"data.train[].{leaf}")
    return places


def explain_unknown(section_path: str, key: str, model: type[BaseModel]) -> str:
    """Say what to write instead of `key`, which `model` (the section at `section_path`) does not have."""
    where = f"unknown key in {section_path}" if section_path else "unknown key at the top level"
    known = list(model.model_fields)
    word = key.replace("-", "_").strip().lower()
    places = leaves()
    renamed, instead, differs = foreign_keys()
    if word in known:
        return f"{where}; write {word}"
    if word in Config.model_fields:
        return f"{where}; it is a section of its own, at the top level"
    if model is DataSection and word in SourceSection.model_fields:
        return f"{where}; it belongs in a source, data.train[].{word}"
    if word in places:
        return f"{where}; it belongs in {_belongs(places[word])}"
    if word in renamed:
        return f"{where}; here it is called {renamed[word]}" + (f" ({differs[word]})" if word in differs else "")
    if word in instead:
        return f"{where}; {instead[word]}"
    near_here = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    near_any = difflib.get_close_matches(word, [*places, *renamed, *instead], n=1, cutoff=0.8)
    if near_here and (not near_any or _likeness(word, near_here[0]) >= _likeness(word, near_any[0])):
        return f"{where}; did you mean {near_here[0]}?"
    if near_any:
        near = near_any[0]
        if near in places:
            return f"{where}; did you mean {_belongs(places[near])}?"
        meaning = f"Here that is called {renamed[near]}" if near in renamed else f"({instead[near]})"
        return f"{where}; did you mean {near}? {meaning}"
    if not section_path:
        return f"{where}; the sections are {', '.join(known)} (keys that start with x- are left alone)"
    return f"{where}{THE_KEYS}{', '.join(known)}"


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _belongs(places: list[str]) -> str:
    section = places[0].split(".")[0]
    return f"{section}: {places[0]}" if len(places) == 1 and "." in places[0] else " or ".join(places)
