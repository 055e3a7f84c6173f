"""Count, mean, variance, least and greatest of numbers that come in pieces, for each of C columns at once.

Pieces are merged by the rule of Chan, Golub and LeVeque (1979), which Welford's is the case of one number of; nothing
is summed over the whole stream, so nothing is lost to cancellation. NaN and infinities are counted and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(slots=True)
class Moments:
    """Of C columns; every field is an array of length C."""

    count: F64
    """Finite numbers."""
    mean: F64
    m2: F64
    """Sum of squared deviations from the mean."""
    low: F64
    high: F64
    """Infinite and the wrong way round while there is no finite number."""
    nan: F64
    infinite: F64

    @classmethod
    def none(cls, columns: int = 1) -> Moments:
        """Of no numbers yet."""
        zeros = [np.zeros(columns) for _ in range(5)]
        return cls(zeros[0], zeros[1], zeros[2], np.full(columns, np.inf), np.full(columns, -np.inf), *zeros[3:])

    @classmethod
    def of(cls, rows: F64) -> Moments:
        """Of one piece, ``[n, C]``."""
        if not len(rows):
            return cls.none(rows.shape[1])
        columns = np.ascontiguousarray(rows.T)  # numpy sums along short rows many times slower
        finite = np.isfinite(columns)
        size = float(len(rows))
        with np.errstate(over="ignore", invalid="ignore"):
            if finite.all():
                mean = columns.mean(axis=1)
                m2 = np.square(columns - mean[:, None]).sum(axis=1)
                lost = [np.zeros(len(columns)), np.zeros(len(columns))]
                return cls(np.full(len(columns), size), mean, m2, columns.min(axis=1), columns.max(axis=1), *lost)
            count = finite.sum(axis=1).astype(np.float64)
            mean = np.where(finite, columns, 0).sum(axis=1) / np.maximum(count, 1)
            m2 = np.square(np.where(finite, columns - mean[:, None], 0)).sum(axis=1)
        nan = np.isnan(columns).sum(axis=1).astype(np.float64)
        low = np.where(finite, columns, np.inf).min(axis=1)
        high = np.where(finite, columns, -np.inf).max(axis=1)
        return cls(count, mean, m2, low, high, nan, size - count - nan)

    def merge(self, other: Moments) -> Moments:
        """Of the numbers of both."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            apart = other.mean - self.mean
            mean = self.mean + apart * share
            m2 = self.m2 + other.m2 + apart * apart * self.count * share
        return Moments(
            count, mean, m2, np.minimum(self.low, other.low), np.maximum(self.high, other.high),
            self.nan + other.nan, self.infinite + other.infinite,
        )  # fmt: skip

    def pooled(self) -> Moments:
        """Of the numbers of all columns together: C = 1."""
        whole = Moments.none()
        for column in range(len(self.count)):
            part = slice(column, column + 1)
            whole = whole.merge(
                Moments(
                    self.count[part], self.mean[part], self.m2[part], self.low[part], self.high[part],
                    self.nan[part], self.infinite[part],
                )
            )  # fmt: skip
        return whole

    @property
    def std(self) -> F64:
        """Standard deviation of what was seen (divided by n, as numpy does and normalisation wants); NaN of nothing."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.count)
