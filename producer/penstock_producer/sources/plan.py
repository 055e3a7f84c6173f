"""The order of an epoch and its cut into shards, as pure functions: any worker finds the same from seed and epoch.

Rests on Philox's raw output, which numpy keeps stable across versions; ``Generator.permutation`` promises less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SHARD_SAMPLES = 1 << 20
"""Docs: a shard holds at most 2^20 samples (bits of one ledger key)."""

TAPER_SHARDS = 4
"""The rule below takes an epoch to be made by one worker for every two times so many full shards."""
SMALLEST_PART = 8
"""The last shards of an epoch have this part of a full one: its end then waits for one worker an eighth as long."""
MOST_HELPERS = 64
"""Bounds how many small shards there are, where shards are small for another reason than many workers."""

_PERMUTATION, _SAMPLE = 0, 1
"""Last counter word of Philox: keeps the two uses of one (seed, epoch) key apart."""


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Indices 0..n-1 in an order fixed by seed and epoch: those of n 64-bit Philox words, sorted.

    Key (seed, epoch), counter from 0; a stable sort settles equal words.
    """
    words = _philox(seed, epoch, (0, 0, 0, _PERMUTATION)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def in_order(n: int) -> NDArray[np.int64]:
    """Indices 0..n-1 as they are: an epoch that is not shuffled."""
    return np.arange(n, dtype=np.int64)


def sample_rng(seed: int, epoch: int, shard: int, offset: int) -> np.random.Generator:
    """The generator of one identity's random augmentation: the same whenever and wherever it is made (again)."""
    # made from a seed and then set, as numpy asks the system for entropy first where only key and counter are given;
    # the seed is what `spawn` goes by
    seed &= 0xFFFF_FFFF_FFFF_FFFF
    philox = np.random.Philox(np.random.SeedSequence((seed, epoch, shard, offset)))
    state: Any = {
        "bit_generator": "Philox",
        "state": {"counter": (0, offset, shard, _SAMPLE), "key": (seed, epoch)},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    philox.state = state
    return np.random.Generator(philox)


def _philox(seed: int, epoch: int, counter: tuple[int, int, int, int]) -> np.random.Philox:
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64))


def shard_size(left: int, n: int, shard_samples: int) -> int:
    """Samples of the next shard when ``left`` of the epoch's ``n`` are not cut yet: full ones, then ever smaller.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): an equal share of what is left for each of twice as many
    workers as the epoch seems planned for, so that all of them end together.
    """
    shares = min(MOST_HELPERS, n // (TAPER_SHARDS * shard_samples))
    if shares < 2:  # so few shards that a smaller one would only be another one
        return shard_samples
    return max(-(-shard_samples // SMALLEST_PART), min(shard_samples, -(-left // shares)))


def cut(n: int, shard_samples: int) -> list[int]:
    """Sizes of the shards of n samples: ``shard_samples`` at first, towards the end less; see `shard_size`."""
    _check(shard_samples)
    sizes: list[int] = []
    left = n
    while left:
        sizes.append(min(left, shard_size(left, n, shard_samples)))
        left -= sizes[-1]
    return sizes


def cut_batches(sizes: Sequence[int] | NDArray[np.int64], shard_samples: int) -> list[int]:
    """Items per shard for items of these sizes in epoch order: as many as fit the shard's size, and at least one."""
    _check(shard_samples)
    counts: list[int] = []
    left = n = int(sum(sizes))
    held = room = 0
    for item, size in enumerate(map(int, sizes)):
        if size > MAX_SHARD_SAMPLES:
            raise ValueError(f"batch {item} holds {size} samples; a shard takes at most {MAX_SHARD_SAMPLES}")
        if not counts or held + size > room:
            counts.append(0)
            held, room = 0, shard_size(left, n, shard_samples)
        counts[-1] += 1
        held += size
        left -= size
    return counts


def items_of(order: NDArray[np.int64], counts: Sequence[int], shard: int) -> NDArray[np.int64]:
    """The source indices of one shard, in shard order; ``counts`` are items per shard."""
    start = sum(counts[:shard])
    return order[start : start + counts[shard]]


def _check(shard_samples: int) -> None:
    if not 1 <= shard_samples <= MAX_SHARD_SAMPLES:
        raise ValueError(f"a shard of {shard_samples} samples; expected 1 to {MAX_SHARD_SAMPLES}")
