"""One server of a cluster comes back older: no fact of another server outlives what it rests on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.servers.embedded import find_servers
from penstock_common.stream.streams import Stream
from penstock_consumer.read.hooks import hooks_of
from tests.clusters import Cluster, started_cluster, until
from tests.torn import TornPair, torn_master_of

SPEC = {"x": ("int64", (100,))}
SHARDS, EACH = 6, 100
ALL = list(range(SHARDS * EACH))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three masters, with a replica each."""
    with started_cluster(find_servers()[0], masters=3, replicas=1) as found:
        yield found


def sample(number: int) -> dict[str, Any]:
    """A sample that shows its number."""
    return {"x": np.full(100, number)}


def written(cluster: Cluster, durability: str | None = None) -> Stream:
    """Write an epoch, a third of it to each master."""
    tuning = penstock.Tuning(durability=durability, block_bytes=8000)
    with (
        penstock.Writer("t", url=cluster.url, spec=SPEC, partitions=3, tuning=tuning) as writer,
        writer.epoch(sizes=[EACH] * SHARDS) as epoch,
    ):
        for number in range(SHARDS):
            with epoch.shard(number) as shard:
                for offset in range(EACH):
                    shard.write(sample(number * EACH + offset))
        return writer.stream


@contextmanager
def torn(cluster: Cluster, stream: Stream, partition: int) -> Iterator[TornPair]:
    """Yield the master and the replica of a partition."""
    with torn_master_of(cluster, stream.partitions[partition].roster) as pair:
        yield pair


def numbers_of(batch: penstock.Batch) -> list[int]:
    """Return the numbers of a batch's samples."""
    return [int(number) for number in batch["x"][:, 0]]


@contextmanager
def at_work(work: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Yield whether a thread is at work. It must end, without an error."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield thread.is_alive
    thread.join(60)
    assert not failed, failed
    assert not thread.is_alive()


@pytest.mark.parametrize("durability", ["memory", "auto", "replicas=1"])
def test_lost_acknowledgements_are_sent_again(cluster: Cluster, durability: str) -> None:
    """Their samples would be trained on again, or be owed for ever once the member is gone."""
    stream, found = written(cluster, durability), Counter[int]()
    with torn(cluster, stream, 1) as pair, penstock.Loader("t", group="g", batch_size=20, url=cluster.url) as loader:
        for number, batch in enumerate(loader):
            found.update(numbers_of(batch))
            if number == 2:
                pair.cut_off()
            if number == 12:
                hooks_of(loader).acknowledger.flush()
                pair.fail_over()
    assert found == dict.fromkeys(ALL, 1)
    with connect(cluster.url) as client:
        for partition in stream.partitions:
            assert ("g", 0) in load_roster(client, partition).closed
            assert client.xpending(partition.entries(0), "g")["pending"] == 0
        for shard in range(SHARDS):
            assert client.bitcount(stream.partition_of(shard).ledger(0, "g", shard)) == EACH


def test_a_group_is_joined_once_every_roster_is_on_a_replica(cluster: Cluster) -> None:
    """A roster that lost the join would end its training, and retention would not wait for the group there."""
    stream, said, found = written(cluster, "replicas=1"), list[str](), Counter[int]()

    def train() -> None:
        tuning = penstock.Tuning(notify=said.append)
        with penstock.Loader("t", group="g", batch_size=20, url=cluster.url, tuning=tuning) as loader:
            for batch in loader:
                found.update(numbers_of(batch))

    with torn(cluster, stream, 1) as pair:
        pair.cut_off()
        with at_work(train) as is_training:
            until(lambda: any("'replicas=1': 0 of 1 replicas have it" in line for line in said), 10)
            assert is_training()
            assert not found
            pair.fail_over()
            cluster.add_replica(pair.replica)
    assert found == dict.fromkeys(ALL, 1)
