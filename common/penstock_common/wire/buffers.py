"""A pool of memory maps in which writers gather blocks. A map is used again once nothing refers to it.

Without the pool, a writer of many small shards takes 130 page faults for each two blocks of 256 kB.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from sys import getrefcount

POOL_BYTES = 16 << 20
"""Bytes that a process keeps. A map beyond them is freed with its last reference."""


def _references(maps: list[mmap]) -> int:
    for found in maps:
        return getrefcount(found)
    raise AssertionError


_UNUSED = _references([mmap(-1, 1)])
"""The reference count, in this interpreter, of a map that only the list and the loop over it hold."""


class MapPool:
    """A pool of maps for any thread. Reference counts show which maps are free."""

    def __init__(self, kept_bytes: int = POOL_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._maps: list[mmap] = []

    def take(self, nbytes: int) -> mmap:
        """Return a map of ``nbytes`` with undefined content, to which nothing else refers."""
        for found in self._maps:  # a second thread's loop raises the count, so at most one of them takes it
            if len(found) == nbytes and getrefcount(found) == _UNUSED:
                return found
        made = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        if nbytes <= self._kept_bytes:
            while self.kept_bytes + nbytes > self._kept_bytes:
                del self._maps[:1]  # a slice, since another thread may have emptied the list
            self._maps.append(made)
        return made

    @property
    def kept_bytes(self) -> int:
        """The bytes of all maps of the pool, used or not."""
        return sum(map(len, self._maps))


BLOCKS = MapPool()
"""The pool of all writers of this process."""
