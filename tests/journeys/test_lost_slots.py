"""One master of a cluster dies, and its replica has less: writers repair what the slots say of each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_common.errors import EpochIncomplete
from penstock_common.server.slots import slot_of
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.servers.embedded import find_servers
from penstock_common.stream.streams import Stream
from penstock_producer.write.cleaner import CleanupTimer
from tests.clusters import Cluster, started_cluster, until
from tests.torn import torn_master_of

SIZES = [20, 20, 20]
"""A shard for each of three masters."""
QUIET = penstock.Tuning(durability="memory", notify=lambda _: None)
"""No write waits for a replica, so all that is written after the cut is lost."""
READER = penstock.Tuning(notify=lambda _: None)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three masters, with a replica each."""
    with started_cluster(find_servers()[0], masters=3, replicas=1) as found:
        yield found


def writer_of(cluster: Cluster) -> penstock.Writer:
    """Return a writer with a partition on each master."""
    spec = {"x": ("int64", (4,))}
    return penstock.Writer("t", url=cluster.url, spec=spec, partitions=3, tuning=QUIET)


def write(epoch: Any, shards: Iterable[int]) -> None:
    """Write some shards, in which each sample has its position."""
    for number in shards:
        with epoch.shard(number) as shard:
            for offset in range(SIZES[number]):
                shard.write({"x": np.full(4, number * 20 + offset)})


def elsewhere(cluster: Cluster, stream: Stream) -> int:
    """Return a partition that another master than the stream's has."""
    own = cluster.master_of(stream.keys.meta)
    return next(p.number for p in stream.partitions if cluster.master_of(p.roster) is not own)


def test_a_release_that_a_failover_loses_is_completed_by_a_living_writer(cluster: Cluster) -> None:
    """The bytes counted against the budget for ever, and nothing said so."""
    with writer_of(cluster) as writer, connect(cluster.url) as client:
        stream, said = writer.stream, list[str]()
        with writer.epoch(sizes=SIZES) as epoch:
            write(epoch, range(3))
        lost = stream.partitions[elsewhere(cluster, stream)]
        timer = CleanupTimer(client, stream, said.append, every_s=0.3)
        timer.start()
        try:
            with torn_master_of(cluster, lost.roster) as pair:
                time.sleep(1)  # the timer has looked once, and found nothing
                pair.cut_off()
                release_epoch(client, stream, 0)
                pair.fail_over()
            with connect(cluster.url) as fresh:
                until(lambda: load_roster(fresh, lost).bytes == 0, 30)
                assert not load_roster(fresh, lost).epochs
                assert audit_stream(fresh, "t").is_clean
        finally:
            timer.stop()
        assert any("has no manifest" in line for line in said), said


def test_an_epoch_that_a_failover_loses_in_one_partition_is_written_to_its_end(cluster: Cluster) -> None:
    """Its writer said that it was released."""
    with writer_of(cluster) as writer:
        stream = writer.stream
        lost = elsewhere(cluster, stream)
        with torn_master_of(cluster, stream.partitions[lost].roster) as pair:
            pair.cut_off()
            epoch = writer.epoch(sizes=SIZES)
            others = [number for number in range(3) if number != lost]
            for number in others:
                write(epoch, range(number, number + 1))
            pair.fail_over()
        write(epoch, range(lost, lost + 1))
        with connect(cluster.url) as client:
            assert retained_epochs(client, stream) == {0: "produced"}
            assert audit_stream(client, "t").is_clean
        with penstock.Loader("t", group="g", batch_size=10, url=cluster.url, tuning=READER) as loader:
            assert sorted(int(x) for batch in loader for x in batch["x"][:, 0]) == list(range(60))


def test_what_a_failover_takes_from_a_produced_epoch_is_named_with_its_server(cluster: Cluster) -> None:
    """A trainer read that it never received the samples, and no message said that a server had lost them."""
    with writer_of(cluster) as writer:
        stream = writer.stream
        lost = elsewhere(cluster, stream)
        epoch = writer.epoch(sizes=SIZES)
        for number in range(3):
            if number != lost:
                write(epoch, range(number, number + 1))
        with torn_master_of(cluster, stream.partitions[lost].roster) as pair:
            pair.cut_off()
            write(epoch, range(lost, lost + 1))
            pair.fail_over()
            where = f"127.0.0.1:{pair.replica.port}"
        with (
            pytest.raises(EpochIncomplete, match="lost 20 committed samples") as caught,
            penstock.Loader("t", group="g", batch_size=10, url=cluster.url, tuning=READER) as loader,
        ):
            list(loader)
        assert where in str(caught.value)
        assert f"partition {lost}" in str(caught.value)
        with connect(cluster.url) as client:
            assert audit_stream(client, "t").lost == 20


def test_blocks_are_kept_that_go_to_another_server_than_the_map_names(cluster: Cluster) -> None:
    """A look at a wrong server, which no replica follows, dropped them. The failover then ended the feed."""
    spec, tuning = {"x": ("int64", (4,))}, penstock.Tuning(durability="auto", notify=lambda _: None, block_bytes=4 * 32)
    with penstock.Writer("t", url=cluster.url, spec=spec, partitions=3, tuning=tuning) as writer:
        slots, number = writer.client._slots, elsewhere(cluster, writer.stream)
        assert slots is not None
        partition = writer.stream.partitions[number]
        with writer.epoch(sizes=SIZES) as epoch:
            write(epoch, [one for one in range(3) if one != number])
            with epoch.shard(number) as shard, torn_master_of(cluster, partition.roster) as pair:
                shard.write({"x": np.full(4, number * 20)})
                shard.commit_all()
                pair.cut_off()
                wrong = next(one for one in cluster.replicas if one is not pair.replica)
                for offset in range(1, 17):  # the next look at the map corrects it
                    slots.moved(slot_of(partition.roster), ("127.0.0.1", wrong.port))
                    shard.write({"x": np.full(4, number * 20 + offset)})
                pair.fail_over()
                for offset in range(17, 20):
                    shard.write({"x": np.full(4, number * 20 + offset)})
    with connect(cluster.url) as client:
        assert audit_stream(client, "t").is_clean
