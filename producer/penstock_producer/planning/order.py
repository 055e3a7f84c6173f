"""One epoch of one source in its order, cut into shards: planned by the dispatcher, found again by every worker.

The order is ``sources/choice``'s, the cut ``sources/plan``'s; reading and writing are ``fill``'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock_producer.sources.choice import Choosing, order_of
from penstock_producer.sources.plan import cut, cut_batches, items_of
from penstock_producer.sources.protocol import BatchSource, Source

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
    return source.chosen if isinstance(source, Choosing) else len(source)


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
