"""A few hundred megabytes through little memory: the short form of ``python -m benchmarks.backpressure``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.backpressure import Soak, faults, run_soak

SHORT = Soak(
    total_bytes=150_000_000,
    maxmemory_bytes=80_000_000,
    budget_bytes=36_000_000,
    epochs=2,
    shards=4,
    trainer_bytes_s=60_000_000,
    stall_s=1.5,
)


@pytest.mark.parametrize(
    "soak",
    [
        SHORT,
        replace(SHORT, entry_bytes=4_000_000, shards=2),
        replace(SHORT, writers=4, partitions=2),
        replace(SHORT, writers=2, is_fleet=True),
    ],
    ids=["150 kB", "4 MB", "four writers", "rq fleet"],
)
def test_writers_far_faster_than_their_trainer_keep_the_budget_and_wait_for_nothing(soak: Soak) -> None:
    """The server never above its budget, no sample lost, and a writer that waits costs under 2 % of a core."""
    assert faults(soak, run_soak(soak)) == []
