"""How many key heads a vendor's attention kernel is given at a time in backward.

Outside of its result such a kernel holds, for every query head it is given, dQ in fp32 and its own dK and dV (torch's
flash and memory-efficient kernels do, whatever the number of key heads), and here copies of the group's output and
gradient: about 12 bytes for every element of q in 16 bits. Heads do not depend on each other, so calls with a few at a
time give the same numbers, bit for bit, out of a workspace that stays small.
"""

from __future__ import annotations

WORKSPACE_BYTES = 64 * 2**20  # of one call: at 4,096 tokens still 8 query heads of 128, enough to fill a GPU


def key_heads_at_once(rows: int, tokens: int, groups: int, size: int, itemsize: int, kv_heads: int) -> int:
    """Key heads of one call, each with ``groups`` query heads; at least one, and calls are evened out."""
    each = rows * tokens * groups * size * (4 + 4 * itemsize)
    most = max(1, min(kv_heads, WORKSPACE_BYTES // max(1, each)))
    calls = -(kv_heads // -most)
    return -(kv_heads // -calls)


def head_ranges(kv_heads: int, at_once: int) -> list[tuple[int, int]]:
    """Ranges of key heads, one a call."""
    return [(lo, min(lo + at_once, kv_heads)) for lo in range(0, kv_heads, at_once)]
