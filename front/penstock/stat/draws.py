"""A uniform draw of at most k numbers from a stream of unknown length, for quantiles and histograms.

Each number gets a random key and those with the k least keys are kept, which makes every subset of k equally likely and
two draws mergeable. The error of a quantile q by k of n > k numbers is in its rank: with a probability of 99.7 % it is
the true quantile of some q +- 3 sqrt(q (1 - q) / k), at most 0.6 percentage points with the default k. Of n <= k
numbers all are kept, and the quantiles are numpy's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KEPT = 1 << 16
"""Numbers kept of each tensor: 1 MiB with their keys."""


class Draw:
    """Finite numbers only: the caller leaves NaN and infinities out. The generator is the caller's."""

    def __init__(self, rng: np.random.Generator, kept: int = KEPT) -> None:
        self._rng, self._kept = rng, kept
        self.seen = 0
        """Numbers drawn from."""
        self._threshold = 1.0
        """No key above it can be among the least k any more."""
        self._keys: NDArray[np.float64] = np.empty(0)
        self._values: NDArray[np.float64] = np.empty(0)

    def add(self, values: NDArray[np.float64]) -> None:
        """One piece, 1-D."""
        self.seen += len(values)
        # of n uniform keys, Binomial(n, t) lie below t, anywhere, and each is uniform below t
        count = int(self._rng.binomial(len(values), self._threshold))
        if count < len(values):
            values = values[self._rng.choice(len(values), count, replace=False, shuffle=False)]
        self._keep(self._rng.random(count) * self._threshold, values)

    def merge(self, other: Draw) -> None:
        """Takes over what another has drawn from other numbers."""
        self.seen += other.seen
        self._threshold = min(self._threshold, other._threshold)
        self._keep(other._keys, other._values)

    def _keep(self, keys: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        keys, values = np.concatenate([self._keys, keys]), np.concatenate([self._values, values])
        if len(keys) > self._kept:
            least = np.argpartition(keys, self._kept - 1)[: self._kept]
            keys, values = keys[least], values[least]
            self._threshold = float(keys.max())
        self._keys, self._values = keys, values

    @property
    def is_whole(self) -> bool:
        """Whether every number was kept."""
        return len(self._values) == self.seen

    @property
    def values(self) -> NDArray[np.float64]:
        """What is kept, in no order."""
        return self._values

    def quantiles(self, at: tuple[float, ...]) -> list[float]:
        """By linear interpolation, as numpy's; NaN of nothing."""
        if not len(self._values):
            return [float("nan")] * len(at)
        with np.errstate(over="ignore", invalid="ignore"):  # between the ends of float64 lies more than one
            return [float(value) for value in np.quantile(self._values, at)]
