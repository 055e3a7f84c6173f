"""The order of an epoch: fixed for ever by seed and epoch, and fair where samples are chosen."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock_producer.sources.order import apportion, blend, permutation, walk


def test_the_permutation_is_the_same_for_ever() -> None:
    """Golden numbers: any worker of any numpy version must cut the same shards, and a replay meet the same order."""
    assert permutation(10, seed=0, epoch=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(10, seed=7, epoch=3).tolist() == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]
    assert permutation(10, seed=-1, epoch=0).tolist() == [8, 9, 0, 7, 4, 2, 6, 3, 1, 5]
    assert permutation(100_000, seed=1, epoch=1)[[0, 1, 50_000, 99_999]].tolist() == [58224, 35111, 88273, 65986]


@given(st.integers(0, 3000), st.integers(0, 2**63), st.integers(0, 2**31))
def test_every_index_comes_once(n: int, seed: int, epoch: int) -> None:
    """An epoch that misses or repeats a sample is wrong in silence."""
    order = permutation(n, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))


def test_seeds_and_epochs_differ() -> None:
    """A new epoch must be a new order."""
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(st.integers(0, 10_000), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_shares_add_up_and_are_exact_to_one_sample(total: int, weights: list[float]) -> None:
    """An epoch has the planned size, and rounding loses no sample."""
    counts = apportion(total, weights)
    assert sum(counts) == total
    assert all(abs(count - total * w / sum(weights)) < 1.0001 for count, w in zip(counts, weights, strict=True))


@given(st.integers(1, 40), st.lists(st.integers(0, 90), min_size=1, max_size=8), st.integers(0, 2**40))
def test_nothing_comes_again_before_everything_came(length: int, counts: list[int], seed: int) -> None:
    """A large source is seen whole over the epochs, a small one evenly, however the passes are cut."""
    seen: Counter[int] = Counter()
    first = 0
    for count in counts:
        taken = walk(length, first, count, seed, shuffle=True)
        assert len(taken) == count
        seen.update(taken.tolist())
        first += count
        often = [seen[index] for index in range(length)]
        assert max(often) - min(often) <= 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any), st.booleans())
def test_blending_keeps_every_sample(sizes: list[int], shuffle: bool) -> None:
    """Parts become one order that loses and doubles nothing; unshuffled, each part keeps its own."""
    ends = list(itertools.accumulate(sizes))
    parts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    order = blend(parts, 3, 0, shuffle).tolist()
    assert sorted(order) == list(range(ends[-1]))
    if not shuffle:
        assert all([index for index in order if index in part] == part.tolist() for part in parts)
