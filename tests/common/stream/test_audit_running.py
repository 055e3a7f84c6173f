"""The audit of a stream in use: samples that are still to come are not lost, and removed ones are not missing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import redis

from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import EpochWriter
from tests.common.stream.audited import (
    PER_ENTRY,
    audited,
    entry_of,
    partition_of,
    sample,
    unfinished,
    writer,
)


def test_a_running_epoch_with_pending_and_unread_samples_is_clean(url: str) -> None:
    """An audit during the run must not report a loss of samples that are still to come."""
    with (
        writer(url) as made,
        Loader("train", group="resnet", batch_size=8, url=url, tuning=Tuning(prefetch_bytes=1)) as loader,
    ):
        epoch = unfinished(made)
        batches = iter(loader)
        next(batches), next(batches)
        report = audited(url)
        group = report.epochs[0].groups["resnet"]
        assert (report.is_clean, report.produced, report.lost) == (True, 40, 0)
        assert group.delivered + group.pending + group.unread == 40
        assert group.pending > 0
        assert "still to be trained on" in report.verdict
        epoch.close()


@pytest.fixture
def trimmed(url: str) -> Iterator[EpochWriter]:
    """Write an epoch larger than its budget while it is read, so that retention removes acknowledged entries."""
    with writer(url, budget_bytes=400_000) as made, Loader("train", group="resnet", batch_size=8, url=url) as loader:
        epoch = unfinished(made, 240)
        batches = iter(loader)
        for _ in range(3):
            assert sum(batch.size for batch in islice(batches, 15)) == 120
            for number in range(120):
                epoch.write(sample(number))
            epoch.flush()
        yield epoch
        epoch.close()


def test_a_trimmed_epoch_is_clean(url: str, trimmed: EpochWriter) -> None:
    """Retention may remove entries that every group has acknowledged, which is not a loss."""
    report = audited(url)
    assert report.epochs[0].trimmed > 0
    assert (report.is_clean, report.lost, report.produced) == (True, 0, 600)


def test_an_unread_entry_deleted_from_a_trimmed_epoch_is_lost(
    url: str, client: redis.Redis, trimmed: EpochWriter
) -> None:
    """The removal of some entries by retention does not excuse the loss of others."""
    entry_id, _ = entry_of(client, -1)
    client.xdel(partition_of(client).entries(0), entry_id)
    report = audited(url)
    assert report.lost == PER_ENTRY
    assert any(entry_id.decode() in finding for finding in report.findings)
