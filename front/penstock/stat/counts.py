"""Numbers of 8 bits, counted by value: everything about them follows exactly, and counting is all it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.stat.moments import Moments

BYTE_WIDE = ("uint8", "int8", "bool")


class ByteCounts:
    """How often each of the 256 values occurs in each of C columns."""

    def __init__(self, dtype: str, columns: int) -> None:
        self._counts: NDArray[np.int64] = np.zeros((columns, 256), dtype=np.int64)
        every = np.arange(256, dtype=np.uint8)
        self._values: NDArray[np.int64] = (every.view(np.int8) if dtype == "int8" else every).astype(np.int64)

    def add(self, piece: NDArray[Any]) -> None:
        """One piece, ``[n, C]`` of the dtype."""
        for column in range(len(self._counts)):
            self._counts[column] += np.bincount(piece[:, column].view(np.uint8), minlength=256)

    def moments(self) -> Moments:
        """Of each column; sums are of integers, so nothing is rounded before the end."""
        count = self._counts.sum(axis=1).astype(np.float64)
        mean = (self._counts * self._values).sum(axis=1) / np.maximum(count, 1)
        m2 = (self._counts * np.square(self._values - mean[:, None])).sum(axis=1)
        low = np.where(self._counts > 0, self._values, np.inf).min(axis=1)
        high = np.where(self._counts > 0, self._values, -np.inf).max(axis=1)
        return Moments(count, mean, m2, low, high, np.zeros_like(count), np.zeros_like(count))

    def distinct(self) -> dict[int, int]:
        """Value -> how often, of those that occur at all."""
        whole = self._counts.sum(axis=0)
        return {value: count for value, count in zip(self._values.tolist(), whole.tolist(), strict=True) if count}
