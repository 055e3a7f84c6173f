"""The samples that an epoch takes, and their order, as pure functions of seed and epoch.

Every worker and every repair finds the same order. Shuffling uses Philox's raw output, which numpy keeps stable across
versions. ``Generator.permutation`` promises less. ``jobs.plan`` cuts the order into shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the indices 0 to n-1 in an order that depends on seed and epoch alone.

    The order sorts n 64-bit words of Philox with the key (seed, epoch) and a counter that starts at 0. The sort is
    stable, so equal words keep their order.

    Example:
        >>> permutation(10, seed=0, epoch=0).tolist()
        [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


Indices = NDArray[np.int64]


@runtime_checkable
class ChoosingSource(Protocol):
    """A source whose epoch is a choice among its samples: some may come more than once, some not at all."""

    @property
    def chosen(self) -> int:
        """Return the number of samples in one epoch."""

    def choose(self, seed: int, epoch: int, shuffle: bool, samples: int | None = None) -> Indices:
        """Return the indices of one epoch in their order.

        Args:
            seed: the production's seed, or the seed that a source by weight gives this part.
            epoch: the number of the epoch.
            shuffle: whether the order is random.
            samples: how many indices every epoch takes where this source is part of another. None means ``chosen``.
        """


def order_of(source: object, length: int, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return one epoch's indices for any source: its own choice, or each of its ``length`` indices once."""
    if isinstance(source, ChoosingSource):
        return source.choose(seed, epoch, shuffle)
    return _each_once(length, seed, epoch, shuffle)


def _each_once(length: int, seed: int, epoch: int, shuffle: bool) -> Indices:
    return permutation(length, seed, epoch) if shuffle else np.arange(length, dtype=np.int64)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide ``total`` into whole shares that differ from the exact ones by less than one (largest remainders).

    Example:
        >>> apportion(8, [3, 1, 1])
        [5, 2, 1]
    """
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda part: (counts[part] - exact[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


def walk(length: int, first: int, count: int, seed: int, shuffle: bool) -> Indices:
    """Return the next indices of a source that is passed through again and again.

    No index comes a second time before every index came once, within an epoch and from epoch to epoch.

    Args:
        length: the indices of one pass.
        first: the position of the first index, counted over all passes.
        count: how many indices are wanted.
        seed: the seed of the passes. The number of a pass takes the place of an epoch.
        shuffle: whether each pass has an order of its own.
    """
    taken: list[Indices] = []
    while count:
        number, start = divmod(first, length)
        taken.append(_each_once(length, seed, number, shuffle)[start : start + count])
        first += len(taken[-1])
        count -= len(taken[-1])
    return np.concatenate([np.empty(0, np.int64), *taken])


def blend(parts: Sequence[Indices], seed: int, epoch: int, shuffle: bool) -> Indices:
    """Put all parts into one order: at random, or spread evenly with each part's own order kept."""
    joined = np.concatenate(parts)
    if shuffle:
        order: Indices = joined[permutation(len(joined), seed, epoch)]
        return order
    positions = np.concatenate([(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts])
    even: Indices = joined[np.argsort(positions, kind="stable")]
    return even


def part_at(ends: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Return the part that holds an index of several parts in a row, and the index within it.

    Args:
        ends: the index at which each part ends.
        index: an index from 0 to the last end.

    Example:
        >>> part_at(np.array([3, 5]), 4)
        (1, 1)
    """
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


def part_seed(seed: int, part: str) -> int:
    """Return a seed for one part, because two parts of one length must not have the same order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{part}".encode(), digest_size=7).digest(), "big")
