"""The order of an epoch and its cut into shards: fixed for ever by seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_producer.planning.order import (
    MAX_SHARD_SAMPLES,
    cut,
    cut_batches,
    default_shard_samples,
    items_of,
    shard_size,
)
from penstock_producer.sources.order import in_order, permutation
from penstock_producer.sources.seeding import sample_rng


def test_the_permutation_is_the_same_for_ever() -> None:
    """Golden numbers: any worker of any numpy version must cut the same shards, and a replay meet the same order."""
    assert permutation(10, seed=0, epoch=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(10, seed=7, epoch=3).tolist() == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]
    assert permutation(10, seed=-1, epoch=0).tolist() == [8, 9, 0, 7, 4, 2, 6, 3, 1, 5]
    assert permutation(100_000, seed=1, epoch=1)[[0, 1, 50_000, 99_999]].tolist() == [58224, 35111, 88273, 65986]


def test_a_samples_generator_is_the_same_for_ever() -> None:
    """A shard made again by another worker must be augmented alike; the raw words of Philox are stable in numpy."""
    assert sample_rng(7, 3, 2, 1).bit_generator.random_raw(2).tolist() == [7645033838436941564, 10445199591829203347]


@given(st.integers(0, 3000), st.integers(0, 2**63), st.integers(0, 2**31))
def test_every_index_comes_once(n: int, seed: int, epoch: int) -> None:
    """An epoch that misses or repeats a sample is wrong in silence."""
    order = permutation(n, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), in_order(n))


def test_seeds_and_epochs_differ() -> None:
    """A new epoch must be a new order."""
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_samples_have_generators_of_their_own() -> None:
    """Neighbouring identities must not share their random numbers, nor those of the permutation."""
    drawn = [sample_rng(1, 2, shard, offset).random(8) for shard in range(3) for offset in range(50)]
    assert len(np.unique(np.concatenate(drawn))) == 8 * 150


@given(st.integers(0, 5000), st.integers(1, 700))
def test_shards_cover_the_epoch(n: int, shard_samples: int) -> None:
    """The manifest's sizes must add up, never rise, and shards join to the order."""
    sizes = cut(n, shard_samples)
    order = permutation(n, 1, 1)
    assert sum(sizes) == n
    assert all(size <= shard_samples for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    joined = [items_of(order, sizes, shard) for shard in range(len(sizes))]
    assert np.array_equal(np.concatenate([*joined, order[:0]]), order)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 30])
def test_later_shards_are_smaller_so_that_workers_end_together(workers: int) -> None:
    """The end of an epoch must not wait for one worker: simulated with workers of which one is half as fast."""

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


def test_generators_spawned_from_a_samples_own_are_the_same_again() -> None:
    """A transform may split its generator; a retried job that drew otherwise would make other bytes."""
    first, again, other = (sample_rng(1, 2, 3, offset).spawn(2)[1].random(4).tolist() for offset in (4, 4, 5))
    assert first == again != other
