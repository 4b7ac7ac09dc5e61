"""Rows of the table "pattern -> layers matched", and what takes layers of `lora.target_modules` away again."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from frugal.config import LoraSection
from frugal.errors import ConfigError
from frugal.model_structure import decoder_layers, inside, unreached_by_text


@dataclass(frozen=True)
class PatternRow:
    """One line of the table "pattern -> layers matched"."""

    key: Literal[
        "target_modules", "exclude_modules", "layers_to_transform", "rank_pattern", "alpha_pattern", "modules_to_save"
    ]
    pattern: str
    layers: tuple[str, ...]
    """Names of the modules it applies to."""
    value: float | None = None
    """The rank or alpha that a pattern sets."""
    unreached: tuple[str, ...] = ()
    """Layers that the pattern names and that a text never runs through: they get no adapter."""

    def line(self) -> str:
        """One line for the terminal."""
        value = "" if self.value is None else f" = {self.value:g}"
        line = f"{self.key} {self.pattern!r}{value}: {len(self.layers)} layers"
        if self.unreached:
            line += f"; {len(self.unreached)} more get no adapter, a text never runs through them ({self.unreached[0]})"
        return line


def narrowed(
    model: nn.Module, lora: LoraSection, targets: list[PatternRow]
) -> tuple[list[PatternRow], list[PatternRow]]:
    """``targets`` (rows of target_modules) without what exclude_modules and layers_to_transform take away, and the rows
    that say what these two matched.

    An entry of exclude_modules matches as PEFT's does: a full name or a dotted tail, or, as one text, a regular
    expression over full names. layers_to_transform keeps what is inside decoder layers of these numbers.

    Raises:
        ConfigError: an entry matches no layer, there is no layer of that number, or an entry of target_modules has no
            layer left.
    """
    named = [name for row in targets for name in row.layers]
    excluded = _excluded(lora, named)
    out = {name for row in excluded for name in row.layers}
    chosen = _numbered(model, lora.layers_to_transform)
    layers = tuple(dict.fromkeys(n for n in named if n not in out and inside(n, chosen)))
    kept = set(layers) if lora.layers_to_transform else set(named) - out
    left = [replace(row, layers=tuple(name for name in row.layers if name in kept)) for row in targets]
    for before, after in zip(targets, left, strict=True):
        if after.layers:
            continue
        taken = " and ".join(
            key for key, some in (("lora.exclude_modules", excluded), ("lora.layers_to_transform", chosen)) if some
        )
        raise ConfigError(
            f"lora.target_modules: {before.pattern!r} has no layer left: {taken} take all {len(before.layers)} away "
            f"({before.layers[0]}). Leave it out, or take fewer away."
        )
    if lora.layers_to_transform:
        numbers = ", ".join(str(number) for number in sorted(set(lora.layers_to_transform)))
        excluded.append(PatternRow("layers_to_transform", numbers, layers))
    return left, excluded


def _excluded(lora: LoraSection, named: list[str]) -> list[PatternRow]:
    asked, rows = lora.exclude_modules, []
    for entry in [asked] if isinstance(asked, str) else asked:
        try:
            found = [
                name
                for name in dict.fromkeys(named)
                if (re.fullmatch(entry, name) if isinstance(asked, str) else f".{name}".endswith(f".{entry}"))
            ]
        except re.error as error:
            raise ConfigError(f"lora.exclude_modules: {entry!r} is no valid regular expression: {error}.") from error
        if not found:
            raise ConfigError(nothing("exclude_modules", entry, named, []))
        rows.append(PatternRow("exclude_modules", entry, tuple(found)))
    return rows


def _numbered(model: nn.Module, numbers: list[int]) -> list[str]:
    """Names of the decoder layers of these numbers."""
    if not numbers:
        return []
    beyond = unreached_by_text(model)
    found = {
        int(tail): name
        for name in decoder_layers(model)
        if (tail := name.rsplit(".", 1)[-1]).isdigit() and not inside(name, beyond)
    }
    missing = sorted({number for number in numbers if number not in found})
    if missing:
        there = f"{min(found)} to {max(found)}" if found else "none that has a number"
        raise ConfigError(
            f"lora.layers_to_transform: must be numbers of the model's decoder layers ({there}), got "
            f"{', '.join(map(str, missing))}. They are counted from 0."
        )
    return [found[number] for number in numbers]


def names_single_layers(lora: LoraSection) -> bool:
    """Whether ``lora`` may treat one decoder layer otherwise than another: by its number, in a list or in a pattern."""
    texts = [*lora.rank_pattern, *lora.alpha_pattern]
    for asked in (lora.target_modules, lora.exclude_modules):
        texts += [asked] if isinstance(asked, str) else asked
    return bool(lora.layers_to_transform) or any(re.search(r"(^|[^A-Za-z_0-9])[0-9]|[0-9]\]", text) for text in texts)


def nothing(key: str, pattern: str, names: Iterable[str], other_kind: list[str]) -> str:
    """The message for a pattern without a match: what exists that looks like it."""
    names = list(names)
    plain = re.sub(r"[^\w.]", "", pattern)
    tails = sorted({name.rsplit(".", 1)[-1] for name in names if not name.rsplit(".", 1)[-1].isdigit()})
    near = difflib.get_close_matches(plain.rsplit(".", 1)[-1], tails, n=3, cutoff=0.5)
    fused = [
        tail
        for tail in tails
        if plain in ("q_proj", "k_proj", "v_proj") and re.search(r"qkv|query_key_value|c_attn|Wqkv", tail)
    ]
    text = f"lora.{key}: {pattern!r} matches no layer"
    if other_kind:
        text += f" that can be adapted (it matches {other_kind[0]})"
    if fused:
        return f"{text}. This model has query, key and value in one layer: {', '.join(fused)}."
    if pattern != plain:
        text += " (names are matched from a dot to the end: write `q_proj`, not `^q_proj`"
        text += (
            "; a regular expression goes alone, as one text)" if key in ("target_modules", "exclude_modules") else ")"
        )
    return f"{text}. Near names: {', '.join(near)}." if near else f"{text}. Names: {', '.join(tails[:20])}."
