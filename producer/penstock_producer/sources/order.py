"""Which samples an epoch takes, and in which order: pure functions of seed, epoch and numbers.

Any worker, and any repair, finds the same. Shuffling rests on Philox's raw output, which numpy keeps stable across
versions; ``Generator.permutation`` promises less. The cut into shards is ``planning.order``'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

_PERMUTATION = 0
"""Last counter word of Philox; a sample's own generator has another one (`seeding`)."""


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Indices 0..n-1 in an order fixed by seed and epoch: those of n 64-bit Philox words, sorted.

    Key (seed, epoch), counter from 0; a stable sort settles equal words.
    """
    words = _philox(seed, epoch, (0, 0, 0, _PERMUTATION)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def in_order(n: int) -> NDArray[np.int64]:
    """Indices 0..n-1 as they are: an epoch that is not shuffled."""
    return np.arange(n, dtype=np.int64)


def _philox(seed: int, epoch: int, counter: tuple[int, int, int, int]) -> np.random.Philox:
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64))


Indices = NDArray[np.int64]


@runtime_checkable
class ChoosingSource(Protocol):
    """A source of samples whose epoch is a choice among them: some may come more than once, some not at all."""

    @property
    def chosen(self) -> int:
        """Samples of one epoch."""

    def choose(self, seed: int, epoch: int, shuffle: bool, samples: int | None = None) -> Indices:
        """The source's indices of one epoch, in order: ``chosen`` of them, or always so many as within another."""


def order_of(source: object, length: int, seed: int, epoch: int, shuffle: bool) -> Indices:
    """One epoch of any source: its own choice, or each of its ``length`` indices once."""
    if isinstance(source, ChoosingSource):
        return source.choose(seed, epoch, shuffle)
    return _each_once(length, seed, epoch, shuffle)


def _each_once(length: int, seed: int, epoch: int, shuffle: bool) -> Indices:
    return permutation(length, seed, epoch) if shuffle else in_order(length)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum up to ``total`` and differ from its exact shares by less than one (largest remainders)."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda part: (counts[part] - exact[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


def walk(length: int, first: int, count: int, seed: int, shuffle: bool) -> Indices:
    """``count`` indices from place ``first`` on of passes that follow each other, each over all of ``length``.

    So nothing comes a second time before everything came once, from epoch to epoch as within one.
    """
    taken: list[Indices] = []
    while count:
        number, place = divmod(first, length)
        taken.append(_each_once(length, seed, number, shuffle)[place : place + count])
        first += len(taken[-1])
        count -= len(taken[-1])
    return np.concatenate([in_order(0), *taken])


def blend(parts: Sequence[Indices], seed: int, epoch: int, shuffle: bool) -> Indices:
    """All of them in one order: at random, or each part's own order kept and the parts spread evenly."""
    joined = np.concatenate(parts)
    if shuffle:
        order: Indices = joined[permutation(len(joined), seed, epoch)]
        return order
    places = np.concatenate([(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts])
    even: Indices = joined[np.argsort(places, kind="stable")]
    return even


def part_seed(seed: int, part: str) -> int:
    """A seed of a part's own: two parts of one length must not be walked alike."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{part}".encode(), digest_size=7).digest(), "big")
