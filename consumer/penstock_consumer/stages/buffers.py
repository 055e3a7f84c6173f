"""Memory for batches: 64-byte aligned arrays, used again once nothing refers to them any more.

A fresh large array costs page faults (0.4 s of CPU per GB); a recycled one does not.
"""

from __future__ import annotations

from math import prod
from sys import getrefcount
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes: a cache line, and what TensorFlow and XLA ask for to take an array without a copy."""
TRIED = 8
"""Buffers looked at before a new one is made: they come free in the order they were handed out, so few are enough."""


def _references(owners: list[NDArray[np.uint8]], position: int) -> int:
    owner = owners[position]
    return getrefcount(owner)


_UNUSED = _references([np.empty(1, dtype=np.uint8)], 0)
"""References to a pooled buffer nobody else holds, as this interpreter counts them: newer ones count fewer."""


class ArrayPool:
    """A pool of arrays. Reference counts show which of them are free again.

    Every view of a batch keeps its buffer alive through ``base``, so an array is never used again while a batch, a
    slice of it, a torch or TensorFlow tensor made of it without a copy, refers to it.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        """Buffers remembered per size; what is handed out beyond them is simply freed by its last user."""
        self._pool: dict[int, list[NDArray[np.uint8]]] = {}
        self._starts: dict[int, list[int]] = {}
        """Size -> where in each buffer of `_pool` the first aligned byte is."""
        self._next: dict[int, int] = {}
        """Size -> where the oldest buffer handed out is looked for first."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of undefined content."""
        return self.memory(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return so many bytes of undefined content."""
        owner, start = self._buffer(nbytes)
        return owner[start : start + nbytes]

    def trim(self) -> None:
        """Gives back what nobody refers to: less of it is needed from now on."""
        for nbytes, owners in self._pool.items():
            for position in reversed(range(len(owners))):
                if _references(owners, position) == _UNUSED:
                    del owners[position]
                    del self._starts[nbytes][position]
        self._next.clear()

    def _buffer(self, nbytes: int) -> tuple[NDArray[np.uint8], int]:
        """One that nobody refers to, and its first aligned byte."""
        owners, starts = self._pool.setdefault(nbytes, []), self._starts.setdefault(nbytes, [])
        first = self._next.get(nbytes, 0)
        for step in range(min(TRIED, len(owners))):
            position = (first + step) % len(owners)
            if _references(owners, position) == _UNUSED:
                self._next[nbytes] = position + 1
                return owners[position], starts[position]
        self._next[nbytes] = first + TRIED  # a trainer may keep those for good
        owner = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -owner.ctypes.data % ALIGNMENT
        if len(owners) < self._keep:
            owners.append(owner)
            starts.append(start)
        return owner, start
