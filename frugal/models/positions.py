"""How long a row a model takes: positions that it learned end, rotary ones go on beyond what it was trained for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from frugal.errors import ConfigError, DataError

_TABLE = re.compile(r"(^|[._])(wpe|pos(ition)?s?|embed_positions|position_embeddings?|pos_emb)($|[._])")


@dataclass(frozen=True)
class Positions:
    """What a configuration says about the length of a row."""

    count: int
    learned: bool
    """One row of a table each: there is nothing beyond the last."""

    def check(self, lengths: np.ndarray, what: str) -> str | None:
        """A warning when documents of ``lengths`` tokens [documents] go beyond what the model was trained for.

        Raises:
            DataError: they go beyond the table of a model that learned its positions.
        """
        beyond = int((lengths > self.count).sum())
        if not beyond:
            return None
        found = f"{beyond:,} of {len(lengths):,} {what} rows are longer ({int(lengths.max()):,} tokens the longest)"
        way_out = f"Set data.max_length: {self.count} or less; data.on_overflow says what becomes of longer rows."
        if self.learned:
            raise DataError(f"the model has {self.count:,} positions, and {found}. {way_out}")
        return f"the model was made for {self.count:,} positions, and {found}: it was not trained for that. {way_out}"


def positions(config: Any, model: nn.Module) -> Positions | None:
    """The positions of a model (it may be without memory); None where its configuration names no limit.

    Rotary positions have no table; a table of learned ones is an embedding named as such, and as long as the limit or
    two rows longer (OPT's offset).
    """
    text = config.get_text_config()
    count = getattr(text, "max_position_embeddings", None)
    if not isinstance(count, int) or count < 1:
        return None
    learned = any(
        isinstance(module, nn.Embedding) and _TABLE.search(name) and count <= module.num_embeddings <= count + 2
        for name, module in model.named_modules()
    )
    return Positions(count, learned)


_PER_CALL = ("longrope", "dynamic")
"""Kinds of rotary positions whose factors transformers chooses for a whole call, by its longest row."""


def per_call_rotary(config: Any) -> int | None:
    """The length beyond which one row changes the rotary factors of all rows beside it; None where none does."""
    text = config.get_text_config()
    entry = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    entries = [entry, *(value for value in entry.values() if isinstance(value, dict))]  # one a kind of layer
    for one in entries:
        if one.get("rope_type", one.get("type")) in _PER_CALL:
            original = one.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            return int(original or text.max_position_embeddings)
    return None


def refuse_mixed_lengths(original: int, lengths: np.ndarray, batch_size: int, key: str, *, packing: bool) -> None:
    """Raise ConfigError when a micro-batch may hold rows on both sides of ``original`` tokens (`per_call_rotary`).

    ``key``: the configuration's key of ``batch_size``.
    """
    beyond = int((lengths > original).sum())
    if not beyond or beyond == len(lengths) or (batch_size == 1 and not packing):
        return
    way = [f"{key}: 1 (and more train.gradient_accumulation_steps)"] if batch_size > 1 else []
    way += ["data.packing: false"] if packing else []
    raise ConfigError(
        f"{beyond:,} of {len(lengths):,} rows are longer than {original:,} tokens, where this model's rotary positions "
        "take other factors, for all rows of a micro-batch alike: shorter rows would be trained as they are never "
        "asked. "
        f"Write {' and '.join(way)}, or data.max_length: {original}."
    )
