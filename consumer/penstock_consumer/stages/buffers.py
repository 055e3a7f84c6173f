"""Memory for batches: 64-byte aligned arrays, which are used again once nothing refers to them.

A fresh large array costs page faults (0.4 s of CPU per GB); a recycled one does not.
"""

from __future__ import annotations

import threading
from math import prod
from sys import getrefcount
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""The alignment in bytes: a cache line. TensorFlow and XLA ask for it to take an array without a copy."""
TRIED = 8
"""The buffers tried before a new one is made. They become free in the order of their use, so a few are enough."""


def _references(owners: list[NDArray[np.uint8]], position: int) -> int:
    owner = owners[position]
    return getrefcount(owner)


_UNUSED = _references([np.empty(1, dtype=np.uint8)], 0)
"""The reference count of a buffer that only the pool holds. Newer interpreters count fewer references."""


class ArrayPool:
    """A pool of arrays. Reference counts show which of them are free again.

    Every view of a batch keeps its buffer alive through ``base``. An array is therefore never used again while
    something refers to it: a batch, a slice of it, or a torch or TensorFlow tensor made of it without a copy.
    Several readers may use a pool.
    """

    def __init__(self, keep: int) -> None:
        self._lock = threading.Lock()
        self._keep = keep
        """The number of buffers kept for each size. Its last user frees a buffer beyond that number."""
        self._pool: dict[int, list[NDArray[np.uint8]]] = {}
        self._starts: dict[int, list[int]] = {}
        """The position of the first aligned byte in each buffer of `_pool`, by size."""
        self._next: dict[int, int] = {}
        """The position at which the search for a free buffer begins, by size. The oldest buffer is expected there."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of undefined content."""
        return self.memory(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return ``nbytes`` bytes of undefined content."""
        with self._lock:  # until something refers to the buffer
            owner, start = self._buffer(nbytes)
            return owner[start : start + nbytes]

    def trim(self) -> None:
        """Free the buffers that nothing refers to, because fewer are needed from now on."""
        with self._lock:
            for nbytes, owners in self._pool.items():
                for position in reversed(range(len(owners))):
                    if _references(owners, position) == _UNUSED:
                        del owners[position]
                        del self._starts[nbytes][position]
            self._next.clear()

    def _buffer(self, nbytes: int) -> tuple[NDArray[np.uint8], int]:
        """Return a buffer that nothing refers to, and the position of its first aligned byte."""
        owners, starts = self._pool.setdefault(nbytes, []), self._starts.setdefault(nbytes, [])
        first = self._next.get(nbytes, 0)
        for step in range(min(TRIED, len(owners))):
            position = (first + step) % len(owners)
            if _references(owners, position) == _UNUSED:
                self._next[nbytes] = position + 1
                return owners[position], starts[position]
        self._next[nbytes] = first + TRIED  # a trainer may never free those it holds
        owner = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -owner.ctypes.data % ALIGNMENT
        if len(owners) < self._keep:
            owners.append(owner)
            starts.append(start)
        return owner, start
