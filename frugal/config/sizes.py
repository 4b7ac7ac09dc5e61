"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from frugal.errors import ConfigError

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str | int, what: str) -> int:
    """Bytes of "12GB", "11.5 GiB", "800MB" or a number of bytes. GB and GiB are both 2^30, as GPUs are sold.

    Raises ConfigError, naming ``what``.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    unit = None if match is None else _UNITS.get(re.sub(r"i?b$", "", match[2]))
    if match is None or unit is None or float(match[1]) <= 0:
        raise ConfigError(f"{what} is {str(text)!r}; write a size like 12GB, 11.5GiB or 800MB.")
    return int(float(match[1]) * unit)
