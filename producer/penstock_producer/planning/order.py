"""One epoch of one source in its order, cut into shards: planned by the dispatcher, found again by every worker.

The order is ``sources/order``'s; reading and writing are ``fill``'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock_common.format.limits import MAX_SHARD_SAMPLES
from penstock_producer.sources.order import ChoosingSource, order_of
from penstock_producer.sources.protocol import BatchSource, Source

TAPER_SHARDS = 4
"""The rule below takes an epoch to be made by one worker for every two times so many full shards."""
SMALLEST_PART = 8
"""The last shards of an epoch have this part of a full one: its end then waits for one worker an eighth as long."""
MOST_HELPERS = 64
"""Bounds how many small shards there are, where shards are small for another reason than many workers."""
SHARDS_PER_WORKER = 8
"""Workers end an epoch together when each has several shards to take; fewer leave the last one running alone."""
LARGEST_DEFAULT = 4096
"""Samples: at 1 to 10 ms each a job of some seconds, the most that is made again when a worker dies uncommitted."""


def default_shard_samples(samples: int, workers: int) -> int:
    """Samples per shard when the user does not say."""
    return min(max(1, math.ceil(samples / (max(1, workers) * SHARDS_PER_WORKER))), LARGEST_DEFAULT)


def count_samples(source: Source | BatchSource) -> int:
    """Samples of one epoch."""
    if source.unit == "batch":
        return sum(source.size(item) for item in range(len(source)))
    return source.chosen if isinstance(source, ChoosingSource) else len(source)


class EpochOrder:
    """Which items lie in which shard: cut by ``shard_samples``, or as the ``planned`` sizes of a manifest say.

    Where the source does not have what was planned, `sizes` differ from it.
    """

    def __init__(
        self,
        source: Source | BatchSource,
        *,
        seed: int,
        epoch: int,
        shuffle: bool,
        shard_samples: int = 1,
        planned: Sequence[int] | None = None,
    ) -> None:
        self._source, self._shard_samples, self._planned = source, shard_samples, planned
        self._order = order_of(source, len(source), seed, epoch, shuffle)

    @cached_property
    def _item_sizes(self) -> list[int] | None:
        source = self._source
        return [source.size(int(item)) for item in self._order] if source.unit == "batch" else None

    @cached_property
    def _counts(self) -> list[int]:
        """Items per shard."""
        if self._planned is not None:
            return self._counts_of(self._planned)
        if self._item_sizes is None:
            return cut(len(self._order), self._shard_samples)
        return cut_batches(self._item_sizes, self._shard_samples)

    def _counts_of(self, planned: Sequence[int]) -> list[int]:
        """Items that make shards of these sizes; what the source has beyond them is one shard more."""
        sizes = np.ones(len(self._order), np.int64) if self._item_sizes is None else np.array(self._item_sizes)
        ends = np.searchsorted(np.cumsum(sizes), np.cumsum(np.array(planned, np.int64)), side="right").tolist()
        if not ends or ends[-1] < len(sizes):
            ends.append(len(sizes))
        return [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start]

    @cached_property
    def sizes(self) -> list[int]:
        """Samples per shard: what the manifest plans."""
        if self._item_sizes is None:
            return self._counts
        ends = np.cumsum(self._counts)
        starts = [0, *ends[:-1]]
        return [sum(self._item_sizes[a:b]) for a, b in zip(starts, ends, strict=True)]

    def first(self, count: int) -> NDArray[np.int64]:
        """The source's first indices of the epoch."""
        return self._order[:count]

    def items(self, shard: int) -> NDArray[np.int64]:
        """The source's indices in one shard, in order."""
        return items_of(self._order, self._counts, shard)


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
