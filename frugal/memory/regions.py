"""Regions of one long space (a file, or host memory in slabs), given out like a stack.

Layers store their inputs in order and fetch them in the opposite one, so the region taken last is usually given back
first, and the space ends where the deepest layer's ends.
"""

from __future__ import annotations


class Regions:
    """Who has which bytes. Sizes are rounded up to pages."""

    PAGE_BYTES = 4096

    def __init__(self) -> None:
        self.top = 0
        """End of the last region that is in use."""
        self._free: dict[int, int] = {}
        """Offset -> bytes of regions given back that do not touch the top."""

    def take(self, nbytes: int) -> int:
        """Offset of a region of at least ``nbytes``."""
        nbytes = self.rounded(nbytes)
        for offset, size in self._free.items():
            if size == nbytes:
                del self._free[offset]
                return offset
        offset, self.top = self.top, self.top + nbytes
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a region that `take` gave for ``nbytes``."""
        self._free[offset] = self.rounded(nbytes)
        while self._free:
            last = max(self._free)
            if last + self._free[last] != self.top:
                break
            self.top = last
            del self._free[last]

    @classmethod
    def rounded(cls, nbytes: int) -> int:
        """``nbytes`` in whole pages."""
        return -(-max(nbytes, 1) // cls.PAGE_BYTES) * cls.PAGE_BYTES
