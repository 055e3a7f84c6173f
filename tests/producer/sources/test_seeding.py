"""The generator of each sample: fixed for ever by its identity, and its own."""

from __future__ import annotations

import numpy as np

from penstock_producer.sources.seeding import sample_rng


def test_a_samples_generator_is_the_same_for_ever() -> None:
    """A shard made again by another worker must be augmented alike; the raw words of Philox are stable in numpy."""
    assert sample_rng(7, 3, 2, 1).bit_generator.random_raw(2).tolist() == [7645033838436941564, 10445199591829203347]


def test_samples_have_generators_of_their_own() -> None:
    """Neighbouring identities must not share their random numbers, nor those of the permutation."""
    drawn = [sample_rng(1, 2, shard, offset).random(8) for shard in range(3) for offset in range(50)]
    assert len(np.unique(np.concatenate(drawn))) == 8 * 150


def test_generators_spawned_from_a_samples_own_are_the_same_again() -> None:
    """A transform may split its generator; a retried job that drew otherwise would make other bytes."""
    first, again, other = (sample_rng(1, 2, 3, offset).spawn(2)[1].random(4).tolist() for offset in (4, 4, 5))
    assert first == again != other
