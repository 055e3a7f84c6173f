"""An epoch's cut into shards, and how it is found again from its manifest's sizes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.wire.limits import MAX_SHARD_SAMPLES
from penstock_producer.jobs.plan import (
    EpochOrder,
    cut,
    cut_batches,
    default_shard_samples,
    shard_size,
)
from penstock_producer.sources.protocol import BatchSource, Source


class Lines:
    """Samples by index."""

    unit = "sample"

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class Pages(Lines):
    """Batches of 3 to 7 samples."""

    unit = "batch"

    def size(self, item: int) -> int:
        """Known without reading."""
        return 3 + item % 5


def order(source: Lines, **how: Any) -> EpochOrder:
    """A shuffled epoch."""
    return EpochOrder(cast("Source | BatchSource", source), seed=5, epoch=1, shuffle=True, **how)


@pytest.mark.parametrize("source", [Lines(1000), Pages(300)], ids=["samples", "batches"])
@pytest.mark.parametrize("shard_samples", [1, 7, 20, 60, 5000])
def test_the_manifest_alone_says_how_an_epoch_is_cut(source: Lines, shard_samples: int) -> None:
    """A process that continues or repairs an epoch knows its sizes, not the planned number of workers."""
    planned = order(source, shard_samples=shard_samples)
    again = order(source, planned=planned.sizes)
    assert again.sizes == planned.sizes
    for shard in range(len(planned.sizes)):
        assert again.items(shard).tolist() == planned.items(shard).tolist()


@pytest.mark.parametrize("other", [Lines(999), Lines(1001), Lines(0)], ids=["fewer", "more", "none"])
def test_sizes_of_another_source_do_not_fit(other: Lines) -> None:
    """Samples that the plan has not, or the source has not, must not pass unnoticed."""
    sizes = order(Lines(1000), shard_samples=30).sizes
    assert order(other, planned=sizes).sizes != sizes


@given(st.integers(0, 5000), st.integers(1, 700))
def test_shards_cover_the_epoch(n: int, shard_samples: int) -> None:
    """The manifest's sizes must add up, never rise, and shards join to the order."""
    epoch = order(Lines(n), shard_samples=shard_samples)
    sizes = epoch.sizes
    assert sum(sizes) == n
    assert all(size <= shard_samples for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    joined = [epoch.items(shard) for shard in range(len(sizes))]
    assert np.array_equal(np.concatenate([*joined, epoch.first(0)]), epoch.first(n))


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 30])
def test_later_shards_are_smaller_so_that_workers_end_together(workers: int) -> None:
    """The end of an epoch must not wait for one worker. The simulation has one worker that is half as fast."""

    def ends(sizes: list[int]) -> list[float]:
        free = [0.0] * workers
        for size in sizes:
            first = free.index(min(free))
            free[first] += size * (2.0 if first == 0 and workers > 1 else 1.0)
        return free

    samples = 4800 * workers
    full = default_shard_samples(samples, workers)
    sizes, equal = cut(samples, full), [full] * (samples // full)
    assert sizes[0] == full
    assert sizes[-1] <= full / 8 + 1
    assert len(sizes) < 2 * len(equal)
    waits, before = ends(sizes), ends(equal)
    assert max(waits) - min(waits) <= full / 4
    assert workers == 1 or max(waits) < max(before)


@given(st.lists(st.integers(1, 90), max_size=60), st.integers(1, 200))
def test_batches_are_never_cut(sizes: list[int], shard_samples: int) -> None:
    """A batch is read once, so it belongs to one shard; a shard takes what fits."""
    counts = cut_batches(sizes, shard_samples)
    assert sum(counts) == len(sizes)
    start, n = 0, sum(sizes)
    for count in counts:
        held, room = sizes[start : start + count], shard_size(sum(sizes[start:]), n, shard_samples)
        assert count == 1 or (count > 1 and sum(held) <= room <= shard_samples)
        if start + count < len(sizes):
            assert sum(held) + sizes[start + count] > room
        start += count


def test_impossible_shards_are_refused() -> None:
    """A shard's ledger holds 2^20 bits."""
    for shard_samples in (0, -1, MAX_SHARD_SAMPLES + 1):
        with pytest.raises(ValueError, match="expected 1 to 1048576"):
            cut(10, shard_samples)
    with pytest.raises(ValueError, match="batch 1 holds 1048577 samples"):
        cut_batches([1, MAX_SHARD_SAMPLES + 1], 10)
