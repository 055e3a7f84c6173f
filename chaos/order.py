"""A second computation of the order of an epoch: the place of each sample, and the first word of its generator.

It does not use the code under test. The same seed always gives the same epoch, so this never changes.
"""

from __future__ import annotations

import numpy as np

TAPER_SHARDS, SMALLEST_PART, MOST_HELPERS = 4, 8, 64
"""An epoch of more than eight full shards ends with smaller ones. The smallest are an eighth of a full one."""


def shards(n: int, seed: int, epoch: int, shard_samples: int) -> list[list[int]]:
    """Return the source's indices in each shard of a shuffled epoch of ``n`` samples, in order."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    order = np.argsort(words, kind="stable").tolist()
    shares = min(MOST_HELPERS, n // (TAPER_SHARDS * shard_samples))
    found: list[list[int]] = []
    start = 0
    while start < n:
        size = shard_samples
        if shares >= 2:
            size = max(-(-shard_samples // SMALLEST_PART), min(shard_samples, -(-(n - start) // shares)))
        found.append(order[start : start + size])
        start += size
    return found


def first_word(seed: int, epoch: int, shard: int, offset: int) -> int:
    """Return the first raw word of the generator that makes a sample: its nonce."""
    key = np.array([seed, epoch], np.uint64)
    return int(np.random.Philox(key=key, counter=np.array([0, offset, shard, 1], np.uint64)).random_raw())
