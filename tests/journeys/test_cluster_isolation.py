"""A master that is away or silent: its own partitions wait for its replica, and all others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock_common.errors import ServerUnavailable
from penstock_common.server.slots import slot_of
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import find_servers
from penstock_common.stream.streams import load_stream
from penstock_consumer.read.hooks import hooks_of
from tests.clusters import Cluster, Promotion, started_cluster, until

FAILOVER_S = 4.0
"""The node timeout of these clusters, far above the pause that is allowed elsewhere."""
PAUSE_S = 1.0
"""The longest pause of the partitions elsewhere."""
LOAD_S = 2.5
"""The time that a loaded machine may add."""
AGAIN_S = 1.5
"""The time from a failover until what lay on the lost master is read again: a look at the map, and a connection."""
STEP_S = 0.03
SHARDS, EACH, BATCH = 6, 480, 10
SPEC = {"x": ("int64", (8,))}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three masters, each with a replica."""
    settings = {"cluster-node-timeout": str(int(FAILOVER_S * 1000))}
    with started_cluster(find_servers()[0], replicas=1, settings=settings) as found:
        yield found


def written(url: str, partitions: int = 3) -> None:
    """Write an epoch of many small blocks, whose shards are spread over all masters."""
    with (
        penstock.Writer("train", url=url, spec=SPEC, partitions=partitions) as writer,
        writer.epoch(sizes=[EACH] * SHARDS) as epoch,
    ):
        for number in range(SHARDS):
            with epoch.shard(number) as shard:
                for offset in range(EACH):
                    shard.write({"x": np.full(8, number * EACH + offset)})
                    if offset % BATCH == BATCH - 1:
                        shard.flush()


@dataclass
class Handed:
    """The batches that a training was given: the time and the samples of each."""

    at_s: list[float] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)

    def take(self, batch: penstock.Batch) -> None:
        """Note a batch, and train on it."""
        self.at_s.append(time.monotonic())
        self.numbers.append([int(number) for number in batch["x"][:, 0]])
        time.sleep(STEP_S)

    @property
    def every(self) -> list[int]:
        """All samples, in the order of arrival."""
        return [number for batch in self.numbers for number in batch]

    def longest_pause_s(self, since_s: float, lost: int) -> float:
        """The longest time without a batch, until the last one of the other partitions."""
        elsewhere = [at for at, some in zip(self.at_s, self.numbers, strict=True) if some[0] // EACH % 3 != lost]
        times = [since_s, *(at for at in self.at_s if since_s < at <= elsewhere[-1])]
        return max(later - before for before, later in pairwise(times))

    def longest_pause_of_s(self, shard: int) -> float:
        """The longest time from one batch of a shard to the next."""
        times = [at for at, some in zip(self.at_s, self.numbers, strict=True) if some[0] // EACH == shard]
        return max(later - before for before, later in pairwise(times))

    def again_s(self, since_s: float, lost: int) -> float:
        """The time of the first batch of the lost partition that came from its replica."""
        here = [at for at, some in zip(self.at_s, self.numbers, strict=True) if some[0] // EACH % 3 == lost]
        return next(at for at in here if at > since_s + PAUSE_S)


@pytest.mark.parametrize(("lost", "fault"), [(0, "stop"), (1, "kill")], ids=["stream", "partition"])
def test_partitions_elsewhere_go_on_while_a_master_is_away(cluster: Cluster, lost: int, fault: str) -> None:
    """One server of many is often away, and a training must not stand still each time."""
    written(cluster.url)
    handed, since_s = Handed(), 0.0
    tuning = penstock.Tuning(prefetch_bytes=4 * BATCH * 64)
    with penstock.Loader("train", group="g", batch_size=BATCH, url=cluster.url, tuning=tuning) as loader:
        for batch in loader:
            handed.take(batch)
            if len(handed.at_s) == 2 * BATCH:
                with connect(cluster.url) as client:
                    key = load_stream(client, "train").partitions[lost].roster
                promotion = Promotion(cluster, key)
                cluster.lose_master_of(key, fault)
                since_s = time.monotonic()
    assert sorted(set(handed.every)) == list(range(SHARDS * EACH))
    assert handed.longest_pause_s(since_s, lost) < PAUSE_S + LOAD_S
    assert handed.again_s(since_s, lost) < promotion.at_s + AGAIN_S + 2 * LOAD_S
    with connect(cluster.url) as client:
        assert audit_stream(client, "train").findings == []


@pytest.mark.parametrize(("lost", "fault"), [(0, "kill"), (1, "stop")], ids=["stream", "partition"])
def test_a_rank_goes_on_until_its_next_sample_is_on_the_master_that_is_away(
    cluster: Cluster, lost: int, fault: str
) -> None:
    """A rank reads far ahead, in indexes of all shards, and waits only for what it needs."""
    url, live, long = cluster.url, 1 - lost, 250 * BATCH
    sizes = [long if number == live else 10 * BATCH for number in range(3)]
    total, handed, since_s = sum(sizes), Handed(), 0.0
    lasts_s = FAILOVER_S + 3
    with (
        penstock.Writer("train", url=url, spec=SPEC, partitions=3) as writer,
        writer.epoch(sizes=sizes) as epoch,
        penstock.Loader("train", group="g", batch_size=BATCH, url=url, order=penstock.Canonical()) as loader,
    ):
        batches = iter(loader)
        lengths: list[float] = []
        for number, size in enumerate(sizes):
            with epoch.shard(number) as shard:
                for first in range(0, size, BATCH):
                    for offset in range(first, first + BATCH):
                        shard.write({"x": np.full(8, sum(sizes[:number]) + offset)})
                    shard.flush()
                    if number == live and first == 10 * BATCH:
                        cluster.lose_master_of(writer.stream.partitions[lost].roster, fault)
                        since_s = time.monotonic()
                    if not since_s or time.monotonic() - since_s < lasts_s:
                        asked_s = time.monotonic()
                        handed.take(next(batches))  # the one that was just written
                        lengths.append(time.monotonic() - asked_s)
        for batch in batches:
            handed.take(batch)
    assert handed.every == list(range(total))
    assert max(lengths) < PAUSE_S + LOAD_S
    with connect(url) as client:
        assert audit_stream(client, "train").findings == []


def test_partitions_beside_a_moved_one_do_not_wait_for_its_new_master(cluster: Cluster) -> None:
    """An operator evens out the partitions of a stream that is read, and a master fails later in the same epoch."""
    written(cluster.url, 6)
    handed = Handed()
    tuning = penstock.Tuning(prefetch_bytes=4 * BATCH * 64)
    with (
        connect(cluster.url) as client,
        penstock.Loader("train", group="g", batch_size=BATCH, url=cluster.url, tuning=tuning) as loader,
    ):
        partitions = load_stream(client, "train").partitions
        beside, moved = partitions[1].roster, partitions[4].roster
        assert cluster.master_of(beside) is cluster.master_of(moved)
        for batch in loader:
            handed.take(batch)
            if len(handed.at_s) == 2 * BATCH:
                cluster.half_move_slot_of(moved, cluster.master_of(partitions[2].roster))()
            if len(handed.at_s) == 5 * BATCH:
                cluster.lose_master_of(moved, "stop")
    assert sorted(handed.every) == list(range(SHARDS * EACH))
    assert handed.longest_pause_of_s(1) < PAUSE_S + LOAD_S
    with connect(cluster.url) as client:
        assert audit_stream(client, "train").findings == []


def manual_loader(url: str) -> penstock.Loader:
    """Return a loader with manual acknowledgements, whose lease lasts longer than a failover."""
    tuning = penstock.Tuning(prefetch_bytes=4 * BATCH * 64, lease_s=2 * FAILOVER_S)
    return penstock.Loader("train", group="g", batch_size=BATCH, url=url, acknowledge="manual", tuning=tuning)


def test_leases_and_acknowledgements_elsewhere_do_not_wait_for_a_silent_master(cluster: Cluster) -> None:
    """A lease that is not renewed in time is another member's, which trains on its samples a second time."""
    written(cluster.url)
    with connect(cluster.url) as client, manual_loader(cluster.url) as loader:
        stream, batches = load_stream(client, "train"), iter(loader)
        taken: dict[int, list[penstock.Batch]] = {0: [], 1: [], 2: []}
        while min(map(len, taken.values())) < 20:
            batch = next(batches)
            taken[int(batch["x"][0, 0]) // EACH % 3].append(batch)

        def held(partition: int) -> dict[bytes, int]:
            """Entry -> its idle time in ms, for the entries that are pending in a partition."""
            key = stream.partitions[partition].entries(0)
            with redis.Redis.from_url(urls[partition]) as node:
                pending: list[dict[str, Any]] = node.xpending_range(key, "g", "-", "+", 1000)
            return {one["message_id"]: one["time_since_delivered"] for one in pending}

        urls = [cluster.master_of(partition.roster).url for partition in stream.partitions]
        lost = stream.partitions[1].roster
        acknowledged = set(sorted(held(0))[: len(taken[0])])  # a batch is an entry
        promotion = Promotion(cluster, lost)
        cluster.lose_master_of(lost, "stop")
        began_s = time.monotonic()
        for batch in [*taken[1], *taken[0]]:  # more of the silent master's than may be unanswered at once
            loader.acknowledge(batch)
        assert time.monotonic() - began_s < PAUSE_S + LOAD_S
        until(lambda: not acknowledged & {*held(0)}, PAUSE_S + LOAD_S)
        idle_ms = 0
        while promotion.is_due:
            idle_ms = max(idle_ms, *held(2).values())
            time.sleep(0.1)
        assert idle_ms < 1000 * (PAUSE_S + LOAD_S)


def test_leases_and_acknowledgements_beside_a_moved_partition_do_not_wait_for_its_new_master(cluster: Cluster) -> None:
    """Another member would train on them, though a fault far away is all that happened."""
    written(cluster.url, 6)
    with connect(cluster.url) as client, manual_loader(cluster.url) as loader:
        stream, batches = load_stream(client, "train"), iter(loader)
        beside, moved = stream.partitions[1], stream.partitions[4]
        taken: dict[int, list[penstock.Batch]] = {number: [] for number in range(6)}
        while min(map(len, taken.values())) < 12:
            batch = next(batches)
            taken[int(batch["x"][0, 0]) // EACH].append(batch)
        cluster.half_move_slot_of(moved.roster, cluster.master_of(stream.partitions[2].roster))()
        for _ in range(3):  # the first one may be what finds the new master
            loader.acknowledge(taken[4].pop())
            hooks_of(loader).acknowledger.flush()
        until(lambda: len(loader._joined().heartbeat._each) == 4)

        def held() -> dict[bytes, int]:
            """Return entry -> its idle time in ms, for the pending entries of the partition that stayed."""
            with redis.Redis.from_url(cluster.master_of(beside.roster).url) as node:
                pending: list[dict[str, Any]] = node.xpending_range(beside.entries(0), "g", "-", "+", 1000)
            return {one["message_id"]: one["time_since_delivered"] for one in pending}

        acknowledged = set(sorted(held())[:10])  # a batch is an entry
        promotion = Promotion(cluster, moved.roster)
        cluster.lose_master_of(moved.roster, "stop")
        for batch in [*taken[4], *taken[1][:10]]:
            loader.acknowledge(batch)
        until(lambda: not acknowledged & {*held()}, PAUSE_S + LOAD_S)
        idle_ms = 0
        while promotion.is_due:
            idle_ms = max(idle_ms, *held().values())
            time.sleep(0.1)
        assert idle_ms < 1000 * (PAUSE_S + LOAD_S)


def test_a_slot_that_stays_half_moved_is_named_with_the_command_that_repairs_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool that moved it may have died, and nothing but an operator ends that."""
    written(cluster.url)
    for module in ("waiting", "server.connection", "stream.groups.outbox"):
        monkeypatch.setattr(f"penstock_common.{module}.OUTAGE_S", 3.0)
    handed, told = Handed(), list[str]()
    with connect(cluster.url) as client:
        stream = load_stream(client, "train")
    lost = next(p for p in stream.partitions if cluster.master_of(p.roster) is not cluster.master_of(stream.keys.meta))
    tuning = penstock.Tuning(prefetch_bytes=4 * BATCH * 64, notify=told.append)
    with (
        pytest.raises(ServerUnavailable) as caught,
        penstock.Loader("train", group="g", batch_size=BATCH, url=cluster.url, tuning=tuning) as loader,
    ):
        for batch in loader:
            handed.take(batch)
            if len(handed.at_s) == BATCH:
                finish = cluster.half_move_slot_of(lost.roster)
    words = f"partition {lost.number} of 'train'"
    slot, node = slot_of(lost.roster), cluster.master_of(lost.roster)
    assert words in str(caught.value)
    assert f"slot {slot} moves from redis://127.0.0.1:{node.port} to" in str(caught.value)
    assert f"`redis-cli --cluster fix 127.0.0.1:{node.port}`" in str(caught.value)
    assert any(f"reading {words}" in one for one in told), told
    finish()
    with penstock.Loader("train", group="g", batch_size=BATCH, url=cluster.url) as loader:
        for batch in loader:
            handed.take(batch)
    assert set(handed.every) == set(range(SHARDS * EACH))
    with connect(cluster.url) as client:
        assert audit_stream(client, "train").findings == []
