"""One server of a cluster comes back older: no fact of another server outlives what it rests on."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_common.errors import ShardMismatch
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.groups.positions import known_positions
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import load_manifest, retained_epochs
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.servers.durability import AUTO_S
from penstock_common.stream.servers.embedded import find_servers
from penstock_common.stream.streams import Stream
from penstock_consumer.read.hooks import hooks_of
from penstock_producer.write.cleaner import Cleaner, clean_up, recycle
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


def writer_of(cluster: Cluster, durability: str | None = None, partitions: int = 3, **options: Any) -> penstock.Writer:
    """Return a writer of a stream with partitions on each master."""
    tuning = penstock.Tuning(durability=durability, block_bytes=8000, notify=options.pop("notify", None))
    return penstock.Writer("t", url=cluster.url, spec=SPEC, partitions=partitions, tuning=tuning, **options)


def written(cluster: Cluster, durability: str | None = None, **options: Any) -> Stream:
    """Write an epoch, a third of it to each master."""
    with (
        writer_of(cluster, durability, **options) as writer,
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
    with connect(cluster.url, bears_outages=print) as client:
        for partition in stream.partitions:
            assert ("g", 0) in load_roster(client, partition).closed
            assert client.xpending(partition.entries(0), "g")["pending"] == 0
        for shard in range(SHARDS):
            assert client.bitcount(stream.partition_of(shard).ledger(0, "g", shard)) == EACH


@pytest.mark.parametrize("who", ["the member", "another member"])
def test_what_was_acknowledged_is_not_delivered_again_as_new(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The replica has no record of the delivery, so it would deliver the samples to the first member that asks."""
    monkeypatch.setattr("penstock_consumer.read.shared.OTHERS_S", 4.0)  # on a busy machine the other one is late
    found = Counter[int]()

    def train(loader: penstock.Loader, batches: Iterator[penstock.Batch]) -> None:
        for batch in batches:
            found.update(numbers_of(batch))
            loader.acknowledge(batch)

    def loader_of(member: str) -> penstock.Loader:
        tuning = penstock.Tuning(member=member, prefetch_bytes=1, notify=lambda _: None)
        return penstock.Loader("t", group="g", batch_size=10, url=cluster.url, acknowledge="manual", tuning=tuning)

    with (
        writer_of(cluster, "memory") as writer,
        connect(cluster.url, bears_outages=print) as client,
        torn(cluster, writer.stream, 1) as pair,
        loader_of("a") as loader,
        loader_of("b") as other,
    ):
        ledger = writer.stream.partitions[1].ledger(0, "g", 1)
        shard = writer.epoch(sizes=[0, EACH]).shard(1)
        for number in range(60):
            shard.write(sample(number))
        shard.commit_all()
        if who == "another member":
            other._joined()
        batches = iter(loader)
        train(loader, itertools.islice(batches, 1))
        pair.cut_off()
        train(loader, itertools.islice(batches, 5))
        hooks_of(loader).acknowledger.flush()
        assert client.bitcount(ledger) == 60
        pair.fail_over()
        reading = (loader, batches) if who == "the member" else (other, iter(other))
        with at_work(lambda: train(*reading)):
            for number in range(60, EACH):
                shard.write(sample(number))
            shard.close()
            writer.epoch(0).shard(0).close()
        train(loader, batches)
    assert found == dict.fromkeys(range(EACH), 1)


def test_what_was_acknowledged_is_not_delivered_again_by_the_server_that_a_slot_moved_to(cluster: Cluster) -> None:
    """The member still reads the partition together with those of its former server, which lost nothing."""
    found = Counter[int]()

    def train(batches: Iterator[penstock.Batch]) -> None:
        for batch in batches:
            found.update(numbers_of(batch))
            loader.acknowledge(batch)

    few = penstock.Tuning(prefetch_bytes=1, notify=lambda _: None)
    with (
        writer_of(cluster, "memory", partitions=6) as writer,
        connect(cluster.url, bears_outages=print) as client,
        penstock.Loader("t", group="g", batch_size=10, url=cluster.url, acknowledge="manual", tuning=few) as loader,
    ):
        beside, moved = writer.stream.partitions[1], writer.stream.partitions[4]
        shard = writer.epoch(sizes=[0, 0, 0, 0, EACH]).shard(4)
        for number in range(60):
            shard.write(sample(number))
        shard.commit_all()
        batches = iter(loader)
        train(itertools.islice(batches, 1))
        old, new = cluster.master_of(beside.roster), cluster.master_of(writer.stream.partitions[2].roster)
        assert cluster.master_of(moved.roster) is old
        cluster.half_move_slot_of(moved.roster, new)()
        with torn(cluster, writer.stream, 4) as pair:
            assert pair.master is new
            train(itertools.islice(batches, 1))
            pair.cut_off()
            train(itertools.islice(batches, 4))
            hooks_of(loader).acknowledger.flush()
            assert client.bitcount(moved.ledger(0, "g", 4)) == 60
            pair.fail_over()
            with at_work(lambda: train(batches)):
                for number in range(60, EACH):
                    shard.write(sample(number))
                shard.close()
                for number in range(4):
                    writer.epoch(0).shard(number).close()
    assert found == dict.fromkeys(range(EACH), 1)


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


def test_a_position_is_reported_again_while_its_rank_waits(cluster: Cluster) -> None:
    """No later report would follow, and retention would wait for what is trained on."""
    found: list[penstock.Batch] = []
    with (
        writer_of(cluster, "memory") as writer,
        writer.epoch() as epoch,
        connect(cluster.url, bears_outages=print) as client,
        torn(cluster, writer.stream, 0) as pair,
        penstock.Loader(
            "t", group="g", batch_size=20, url=cluster.url, order=penstock.Canonical(), acknowledge="manual"
        ) as loader,
    ):
        stream = writer.stream
        epoch.write_batch({"x": np.zeros((40, 100), np.int64)})
        epoch.flush()
        batches = iter(loader)
        first, _ = next(batches), next(batches)
        pair.cut_off()
        loader.acknowledge(first)
        hooks_of(loader).acknowledger.flush()
        assert known_positions(client, stream, 0, "g").of(0) == 20
        pair.fail_over()
        assert known_positions(client, stream, 0, "g").of(0) == 0
        with at_work(lambda: found.append(next(batches))):
            until(lambda: known_positions(client, stream, 0, "g").of(0) == 20)
            epoch.write_batch({"x": np.zeros((20, 100), np.int64)})
            epoch.flush()


def test_entries_are_trimmed_by_positions_that_are_on_a_replica(cluster: Cluster) -> None:
    """The first partition has the positions. A rank that is set back would find entries of others gone."""
    stream = written(cluster, "replicas=1")
    with (
        connect(cluster.url, bears_outages=print) as client,
        torn(cluster, stream, 0) as pair,
        penstock.Loader("t", group="g", batch_size=20, url=cluster.url, order=penstock.Canonical()) as loader,
    ):
        pair.cut_off()
        for number, _ in enumerate(loader):
            if number == 20:
                break
        hooks_of(loader).acknowledger.flush()
        cleaner, partition = Cleaner(client, stream, print), stream.partitions[1]
        held = load_roster(client, partition).bytes
        assert cleaner.free_bytes(partition, held) == 0
        pair.fail_over()
        cluster.add_replica(pair.replica)
        hooks_of(loader).acknowledger.flush()  # the positions that the failover lost
        assert cleaner.free_bytes(partition, held) > 0


def test_a_release_forgets_nothing_that_another_server_may_still_have(cluster: Cluster) -> None:
    """A partition that has the epoch again would keep its bytes for ever, because no list would name the epoch."""
    stream = written(cluster, "replicas=1")
    with connect(cluster.url, bears_outages=print) as client, torn(cluster, stream, 1) as pair:
        held = load_roster(client, stream.partitions[1]).bytes
        pair.cut_off()
        assert release_epoch(client, stream, 0)
        assert client.exists(stream.partitions[0].entries(0)), "readers of the other partition may come back"
        pair.fail_over()
        assert load_roster(client, stream.partitions[1]).bytes == held, "it lost the release"
        cluster.add_replica(pair.replica)
        assert 0 in retained_epochs(client, stream)
        clean_up(client, stream, print)
        assert retained_epochs(client, stream) == {}
        for partition in stream.partitions:
            roster = load_roster(client, partition)
            assert (roster.bytes, roster.epochs, roster.retiring) == (0, {}, {})
        left = [
            key for node in cluster.masters for key in cluster.asked(node, "KEYS", "*.*}:*") if b":roster" not in key
        ]
        assert left == []


def test_a_file_is_used_again_once_its_removal_is_on_a_replica(cluster: Cluster, memory_path: Path) -> None:
    """A server that lost the removal refers to it again, and a reader would find other samples there."""
    stream = written(cluster, "replicas=1", payload=f"segments:{memory_path}")
    with connect(cluster.url, bears_outages=print) as client, torn(cluster, stream, 1) as pair:
        pair.cut_off()
        release_epoch(client, stream, 0)
        assert recycle(client, stream, grace_s=0) == 0
        pair.fail_over()
        cluster.add_replica(pair.replica)
        clean_up(client, stream, print)
        assert recycle(client, stream, grace_s=0) == 0  # clean_up did it
        folder = segments_of(stream)
        assert folder is not None
        assert not folder.names()
        assert folder.spare()


def test_a_feed_takes_a_shard_once_that_is_on_a_replica(cluster: Cluster) -> None:
    """Two writers would have one shard, and one of them would have to move what it wrote."""
    said: list[str] = []
    with (
        writer_of(cluster, "replicas=1", notify=said.append) as writer,
        writer_of(cluster, notify=said.append) as other,
        connect(cluster.url, bears_outages=print) as client,
        torn_master_of(cluster, writer.stream.keys.meta) as pair,
    ):
        writer.write(sample(0))
        writer.flush()  # the epoch is there
        pair.cut_off()

        def feed() -> None:
            other.write(sample(1))
            other.flush()

        with at_work(feed) as is_writing:
            until(lambda: any("'replicas=1': 0 of 1 replicas have it" in line for line in said), 10)
            assert is_writing()
            assert client.xlen(writer.stream.partition_of(1).entries(0)) == 0
            pair.fail_over()
            cluster.add_replica(pair.replica)
    with penstock.Loader("t", group="g", batch_size=1, url=cluster.url) as loader:
        batches = iter(loader)
        assert sorted(numbers_of(next(batches)) + numbers_of(next(batches))) == [0, 1]


def test_a_shard_is_done_once_the_blocks_of_an_earlier_run_are_on_a_replica(cluster: Cluster) -> None:
    """The run that ends the shard wrote none of them. The epoch would be produced without samples that are gone."""
    said: list[str] = []
    with (
        writer_of(cluster, "memory") as before,
        writer_of(cluster, "replicas=1", notify=said.append) as writer,
        connect(cluster.url, bears_outages=print) as client,
        torn(cluster, writer.stream, 1) as pair,
    ):
        epoch = writer.epoch(sizes=[0, EACH])
        pair.cut_off()
        earlier = before.epoch(0).shard(1)
        for number in range(EACH):
            earlier.write(sample(number))
        earlier.commit_all()
        earlier.abort()

        def finish() -> None:
            with pytest.raises(ShardMismatch), epoch.shard(1):
                pass

        with at_work(finish) as is_ending:
            until(lambda: any("'replicas=1': 0 of 1 replicas have it" in line for line in said), 10)
            assert is_ending()
            pair.fail_over()
            cluster.add_replica(pair.replica)
        assert load_manifest(client, writer.stream, 0).done == {}
        epoch.shard(0).close()
        with epoch.shard(1) as again:
            for number in range(EACH):
                again.write(sample(number))
        assert load_manifest(client, writer.stream, 0).state == "produced"
        assert audit_stream(client, "t").findings == []


def test_auto_waits_for_no_replica_where_none_follows(cluster: Cluster) -> None:
    """A server without a replica is no error, and training is not slower there."""
    stream, found = written(cluster), Counter[int]()
    with connect(cluster.url, bears_outages=print) as client, torn(cluster, stream, 0) as pair:
        pair.cut_off()
        began = time.monotonic()
        with penstock.Loader("t", group="g", batch_size=20, url=cluster.url) as loader:
            for batch in loader:
                found.update(numbers_of(batch))
        assert release_epoch(client, stream, 0)
        assert retained_epochs(client, stream) == {}
        assert time.monotonic() - began < AUTO_S
    assert found == dict.fromkeys(ALL, 1)
