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
        finite = np.isfinite(rows)
        if finite.all():
            lost = [np.zeros(rows.shape[1]), np.zeros(rows.shape[1])]
            with np.errstate(over="ignore", invalid="ignore"):
                mean = rows.mean(axis=0)
                m2 = np.square(rows - mean).sum(axis=0)
            return cls(np.full(rows.shape[1], float(len(rows))), mean, m2, rows.min(axis=0), rows.max(axis=0), *lost)
        count = finite.sum(axis=0).astype(np.float64)
        nan = np.isnan(rows).sum(axis=0).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.where(finite, rows, 0).sum(axis=0) / np.maximum(count, 1)
            m2 = np.square(np.where(finite, rows - mean, 0)).sum(axis=0)
        low, high = np.where(finite, rows, np.inf).min(axis=0), np.where(finite, rows, -np.inf).max(axis=0)
        return cls(count, mean, m2, low, high, nan, len(rows) - count - nan)

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
