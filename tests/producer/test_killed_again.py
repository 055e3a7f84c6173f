"""Workers killed again and again: what gets on goes on to its end, and what kills every worker ends by name."""

from __future__ import annotations

import os
import signal

import pytest

from penstock_producer.jobs import RETRIES
from penstock_producer.plan import EpochFailed
from penstock_producer.progress import Progress
from tests.producer.made import SAMPLES
from tests.producer.test_jobs import dataset, numbers_in, produce

KILLS = RETRIES + 2


def test_a_shard_that_gets_on_outlives_any_number_of_killed_workers(any_url: str) -> None:
    """Preempted hosts take workers away all day long: only runs that get nowhere may end an epoch."""
    killed: list[int] = []
    seen = [0]

    def kill(look: Progress) -> None:
        if len(killed) < KILLS and look.done > seen[0] and look.pids and look.pids[0] not in killed:
            seen[0] = look.done
            killed.append(look.pids[0])
            os.kill(look.pids[0], signal.SIGKILL)

    summary = produce(
        any_url, dataset("very_slowly"), workers=1, shard_samples=SAMPLES, block_bytes=100, patience_s=120, each=kill
    )
    assert len(killed) == KILLS
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    assert (summary.samples, summary.bad) == (SAMPLES, 0)


def test_a_sample_that_kills_every_worker_fails_its_epoch_and_says_where(any_url: str) -> None:
    """A crash in a transform must not eat workers for ever; shard, place and cause are what its author needs."""
    with pytest.raises(
        EpochFailed,
        match=r"shard 0 of epoch 0 of 'train': worker process \d+ was killed by SIGKILL, the last of 15 .*"
        r"no further than sample 60 of this shard",
    ):
        produce(
            any_url, dataset("always_kills_its_worker"), workers=1, shard_samples=SAMPLES, shuffle=False,
            block_bytes=240, patience_s=120,
        )  # fmt: skip
