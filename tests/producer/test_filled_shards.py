"""Shards and segment files that are full: what comes next, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock_common.errors import ShardMismatch
from penstock_common.tuning import Tuning
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, numbers, sample, writer_of


def test_a_shard_that_reservations_and_bad_samples_filled_is_followed_by_the_next(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever filled it: the writer of an unplanned epoch goes on elsewhere, and no sample is refused."""
    monkeypatch.setattr("penstock_producer.write.writer.SPREAD_SAMPLES", 4)
    with writer_of(any_url, spec=SPEC, partitions=2) as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
        with epoch.reserve(3) as rows:
            rows["x"][...], rows["y"][...] = np.arange(1, 4)[:, None], [1, 2, 3]
        epoch.write(sample(4))
        for _ in range(3):
            epoch.quarantine("it could not be made")
        for number in range(8, 14):
            epoch.write(sample(number))
    with Replay("t", url=any_url, epoch=0, batch_size=5) as replay:
        assert numbers(replay) == [0, 1, 2, 3, 4, *range(8, 14)]


def test_a_shard_takes_no_more_than_was_planned_however_it_was_filled(any_url: str) -> None:
    """One sample too many would have an unplanned identity, or that of another shard's sample."""
    with writer_of(any_url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[4])
        with epoch.shard(0) as shard:
            shard.write(sample(0))
            shard.quarantine("it could not be made")
            shard.write(sample(2))
            shard.write(sample(3))
            for more in (lambda: shard.write(sample(4)), lambda: shard.quarantine("no"), lambda: shard.reserve(1)):
                with pytest.raises(ShardMismatch, match="is full: 4 samples are planned"):
                    more()
        assert shard.position == shard.committed == 4


def test_blocks_that_are_large_have_files_of_their_own(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget holds five blocks of 200 MB: were two in a file, one that is read yet would keep the other's space."""
    monkeypatch.setattr("penstock_producer.write.payloads.LARGE_BYTES", 1 << 20)
    for name, block_bytes, files in (("large", 1 << 20, 2), ("small", 1 << 19, 1)):
        writer = Writer(
            name,
            url=any_url,
            spec={"x": ("uint8", (block_bytes,))},
            tuning=Tuning(block_bytes=block_bytes, notify=lambda _: None),
            budget_bytes=16 << 20,
            payload=f"segments:{tmp_path}",
        )
        with writer, writer.epoch() as epoch:
            for _ in range(2):
                epoch.write({"x": np.ones(block_bytes, np.uint8)})
            assert len(list(tmp_path.glob(f"{name}.*/*.seg"))) == files
