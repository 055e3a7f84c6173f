"""Maps in which blocks are gathered: the next shard's, once nothing refers to them any more.

A writer of many small shards would find the same pages anew for each, 130 of them for two blocks of 256 kB.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from sys import getrefcount

KEPT_BYTES = 16 << 20
"""Remembered at most, by a process; what goes beyond is freed by its last user."""


def _references(maps: list[mmap]) -> int:
    for found in maps:
        return getrefcount(found)
    raise AssertionError


_UNUSED = _references([mmap(-1, 1)])
"""References to a map that nobody but the list and the loop over it holds, as this interpreter counts them."""


class Scratch:
    """Hands out maps, to any thread, and recognises by their reference counts which are free again."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._maps: list[mmap] = []

    def take(self, nbytes: int) -> mmap:
        """So many bytes of undefined content, to which nothing else refers."""
        for found in self._maps:  # held by the loop while it is counted: of two threads that look, at most one takes it
            if len(found) == nbytes and getrefcount(found) == _UNUSED:
                return found
        made = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        if nbytes <= self._kept_bytes:
            while self.kept_bytes + nbytes > self._kept_bytes:
                del self._maps[:1]  # another thread may have been faster
            self._maps.append(made)
        return made

    @property
    def kept_bytes(self) -> int:
        """Of all that are remembered, used or not."""
        return sum(map(len, self._maps))


BLOCKS = Scratch()
"""Of all writers of a process."""
