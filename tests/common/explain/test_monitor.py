"""A monitor has the same counts as a first look, its rates add up, and it costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.explain.snapshot import StreamSnapshot
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client, parse_id
from penstock_common.stream.entries import index_records
from penstock_common.stream.groups.positions import known_positions
from penstock_common.stream.groups.roster import ORDERED, load_roster
from penstock_common.stream.manifest import begun_shards, find_manifest, retained_epochs
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.streams import load_stream
from penstock_producer.write.trimmer import Trimmer
from penstock_producer.write.writer import EpochWriter
from tests.tuned import tuned


@pytest.fixture
def writer(url: str) -> Iterator[penstock.Writer]:
    """Make a writer with two partitions, and one sample of 1000 bytes an entry."""
    with penstock.Writer(
        "train", url=url, spec={"x": ("uint8", (1000,))}, partitions=2, tuning=penstock.Tuning(block_bytes=1)
    ) as made:
        yield made


def write(epoch: EpochWriter, shard: int, count: int, *, bad: int = 0) -> None:
    """Write a whole shard."""
    with epoch.shard(shard) as part:
        for number in range(count):
            part.write({"x": np.full(1000, number % 251, dtype=np.uint8)})
        for _ in range(bad):
            part.quarantine("truncated")


Counts = tuple[str, int, int, int, int]
"""A group's name, lag in entries and in samples, pending entries, dead letters."""


def counted(client: Client) -> list[Counts]:
    """Count every group from all index records, pending lists and positions: nothing is remembered or left out."""
    stream = load_stream(client, "train")
    roster = load_roster(client, stream.partitions[0])
    found: list[Counts] = []
    for name, group in sorted(roster.groups.items()):
        entries = samples = pending = dead = 0
        for number in retained_epochs(client, stream):
            manifest = find_manifest(client, stream, number)
            assert manifest is not None
            dead += sum(client.hlen(partition.dead(number, name)) for partition in stream.partitions)
            if number < group.first or (name, number) in roster.closed:
                continue
            low = known_positions(client, stream, number, name).minimum(group.world)
            for shard in begun_shards(client, stream, manifest):
                partition = stream.partition_of(shard)
                records = [one for one in index_records(client, partition, number, shard) if one.entry_id]
                if group.kind == ORDERED:
                    done = max(low - sum(manifest.shard_size(before) for before in range(shard)), 0)
                    entries += sum(one.end > done for one in records)
                    samples += sum(
                        offset >= done and offset not in one.holes
                        for one in records
                        for offset in range(one.first, one.end)
                    )
                else:
                    given = {
                        one["name"]: one["last-delivered-id"] for one in client.xinfo_groups(partition.entries(number))
                    }
                    unread = [one for one in records if parse_id(one.entry_id) > parse_id(given[name.encode()])]
                    entries += len(unread)
                    samples += sum(one.count for one in unread)
            if group.kind != ORDERED:
                pending += sum(client.xpending(p.entries(number), name)["pending"] for p in stream.partitions)
        found.append((name, entries, samples, pending, dead))
    return found


def agrees(snapshot: StreamSnapshot, client: Client) -> None:
    """Compare what a monitor has added up with a count of everything."""
    fresh = StreamMonitor(client, "train").snapshot()
    assert snapshot.held_bytes == fresh.held_bytes
    seen = [(e.epoch, e.state, e.planned, e.committed, e.bad, e.bytes, e.read) for e in snapshot.epochs]
    assert seen == [(e.epoch, e.state, e.planned, e.committed, e.bad, e.bytes, e.read) for e in fresh.epochs]
    for one in (snapshot, fresh):
        mine = [(g.name, g.lag_entries, g.lag_samples, g.pending_entries, g.dead_letters) for g in one.groups]
        assert mine == counted(client)


def take(url: str, group: str, batches: int, **how: Any) -> None:
    """Train ``batches`` batches of four, and leave."""
    with penstock.Loader(
        "train", group=group, batch_size=4, url=url, **tuned("Loader", how, penstock.Tuning(prefetch_bytes=1))
    ) as loader:
        for number, _ in enumerate(loader, 1):
            if number == batches:
                break


def test_looking_again_counts_what_looking_from_nothing_counts(url: str, writer: penstock.Writer) -> None:
    """The monitor and inspect show the same counts, whatever happened between two looks."""
    with connect(url) as client:
        early = StreamMonitor(client, "train")

        def both_agree() -> StreamSnapshot:
            snapshot = early.snapshot()
            agrees(snapshot, client)
            return snapshot

        both_agree()
        with writer.epoch(sizes=[10, 10, 10]) as epoch:
            write(epoch, 0, 10)
            write(epoch, 1, 8, bad=2)
            snapshot = both_agree()
            assert (snapshot.made_samples, snapshot.made_bytes, snapshot.groups) == (18, 18_000, ())
            take(url, "resnet", 2)
            snapshot = both_agree()
            unread = snapshot.groups[0].lag_samples
            assert snapshot.epochs[0].read == {"resnet": 10}  # two batches of 4, and 2 bad samples
            write(epoch, 2, 10)
            take(url, "late", 1)  # it has not read the forgotten records
            both_agree()
            take(url, "ranks", 1, order="canonical", rank=0, world_size=1)
            both_agree()
        take(url, "resnet", 100)
        snapshot = both_agree()
        resnet = next(group for group in snapshot.groups if group.name == "resnet")
        assert (snapshot.made_samples, resnet.given_samples, resnet.lag_s) == (28, unread + 10, 0.0)
        with writer.epoch(sizes=[5]) as second:
            write(second, 0, 5)
        take(url, "resnet", 100)
        snapshot = both_agree()
        resnet = next(group for group in snapshot.groups if group.name == "resnet")
        assert (snapshot.made_samples, resnet.given_samples) == (33, unread + 15)
        late = next(group for group in snapshot.groups if group.name == "late")
        assert late.lag_samples > 5
        assert 0 < late.lag_s < 60


def test_what_a_member_returned_is_not_read(url: str, writer: penstock.Writer, client: redis.Redis) -> None:
    """A trial that is pruned after its first batch had read ahead. Its epoch showed as read by 100 %."""
    monitor = StreamMonitor(client, "train")
    with writer.epoch(sizes=[30, 10]) as epoch:
        write(epoch, 0, 30)
        write(epoch, 1, 10)
    monitor.snapshot()
    take(url, "trial", 1, prefetch_bytes=1_000_000)
    for _ in range(2):
        snapshot = monitor.snapshot()
        agrees(snapshot, client)
        assert (snapshot.epochs[0].read, snapshot.groups[0].lag_samples) == ({"trial": 4}, 0)
    take(url, "trial", 3)
    agrees(monitor.snapshot(), client)
    take(url, "trial", 100)
    snapshot = monitor.snapshot()
    agrees(snapshot, client)
    assert snapshot.epochs[0].read == {"trial": 40}


def test_a_look_moves_no_payload_and_costs_next_to_nothing(
    url: str, writer: penstock.Writer, client: redis.Redis
) -> None:
    """A monitor must not slow down the stream that it shows. At 1 Hz it may cost a hundredth."""
    with writer.epoch(sizes=[100] * 10) as epoch:
        for shard in range(8):
            write(epoch, shard, 100)
        take(url, "resnet", 20)
        take(url, "vit", 1)
        with connect(url) as looking:
            monitor = StreamMonitor(looking, "train")
            monitor.snapshot()
            client.config_resetstat()
            for _ in range(10):
                monitor.snapshot()
        stats: dict[str, Any] = client.info("commandstats")
        sent = int(client.info("stats")["total_net_output_bytes"])
        assert not {name for name in stats if "xread" in name or "xinfo|stream" in name}
        assert sent < 10 * 20_000  # the stream holds 800 kB
        assert sum(one["usec"] for name, one in stats.items() if "config" not in name) < 10 * 10_000
        write(epoch, 8, 100)
        write(epoch, 9, 100)


def test_an_epoch_that_was_abandoned_shows_what_was_made_and_not_what_was_planned(
    url: str, writer: penstock.Writer
) -> None:
    """Otherwise a production that failed at once would look complete."""
    with writer.epoch(sizes=[100]) as epoch:
        epoch.abandon()
        with connect(url) as looking:
            (seen,) = StreamMonitor(looking, "train").snapshot().epochs
    assert (seen.state, seen.planned, seen.committed) == ("abandoned", 100, 0)


def test_a_stream_made_anew_is_counted_anew(any_url: str) -> None:
    """Counts of a deleted stream do not apply to a new stream of the same name."""
    with connect(any_url) as client:
        monitor = StreamMonitor(client, "train")
        for _ in range(2):
            with (
                penstock.Writer(
                    "train", url=any_url, spec={"x": ("uint8", (1000,))}, tuning=penstock.Tuning(block_bytes=1)
                ) as writer,
                writer.epoch(sizes=[3]) as epoch,
            ):
                write(epoch, 0, 3)
            agrees(monitor.snapshot(), client)
            assert monitor.snapshot().made_samples == 0
            delete_stream(client, "train")


@pytest.mark.parametrize("block_samples", [1, 7, 100])
def test_what_a_rank_has_read_is_not_lag_while_another_rank_has_read_nothing(any_url: str, block_samples: int) -> None:
    """A rank that runs ahead has read its own samples. Only the bytes wait for the slowest rank."""
    with connect(any_url) as client:
        early = StreamMonitor(client, "train")
        with penstock.Writer(
            "train", url=any_url, spec={"y": ("int64", ())}, partitions=2,
            tuning=penstock.Tuning(block_bytes=8 * block_samples),
        ) as writer:  # fmt: skip
            for _ in range(2):
                with writer.epoch(sizes=[60, 49]) as epoch:
                    for shard, size in enumerate((60, 49)):
                        with epoch.shard(shard) as part:
                            for offset in range(size):
                                if offset % 10 == 5:
                                    part.quarantine("truncated")
                                else:
                                    part.write({"y": offset})
        ranks = [position % 16 // 8 for position in range(109) if position % 10 != 5]
        read, left = 2 * ranks.count(1), 2 * ranks.count(0)
        for rank, epochs in ((1, 2), (0, 0)):
            with penstock.Loader(
                "train", group="ddp", batch_size=8, url=any_url, order=penstock.Canonical(rank=rank, world_size=2),
                tuning=penstock.Tuning(notify=lambda _: None),
            ) as loader:  # fmt: skip
                assert early.snapshot().groups[0].lag_samples == (read + left if rank == 1 else left)
                for _ in range(epochs):
                    for _ in loader:
                        pass
        for snapshot in (early.snapshot(), StreamMonitor(client, "train").snapshot()):
            (group,) = snapshot.groups
            assert group.lag_samples == left
            assert sum(epoch.committed - epoch.read["ddp"] for epoch in snapshot.epochs) == left
            assert max(one.position for one in group.ranks) == 109  # its last step ends at 112
        report = audit_stream(client, "train")
        assert (report.is_clean, report.delivered, report.unread) == (True, {"ddp": read}, left)


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_what_was_released_without_a_group_is_not_its_lag(url: str, writer: penstock.Writer, order: str) -> None:
    """A group that had left can read no epoch of which entries were removed, so none of it lies ready for it."""
    how: dict[str, Any] = {} if order == "shared" else {"order": order}
    with connect(url) as client:
        early = StreamMonitor(client, "train")

        def left() -> tuple[int, int, int, tuple[int, int] | None]:
            """Return what a monitor, and a first look, tell of the group."""
            groups = [
                next(group for group in monitor.snapshot().groups if group.name == "left")
                for monitor in (early, StreamMonitor(client, "train"))
            ]
            found = [(one.lag_samples, one.lag_bytes, one.pending_entries, one.lost) for one in groups]
            assert found[0] == found[1]
            return found[0]

        with writer.epoch(sizes=[10, 10]) as epoch:
            write(epoch, 0, 10)
            write(epoch, 1, 10)
        take(url, "left", 2, **how, acknowledge="manual")
        samples, _, pending, lost = left()
        assert (samples + pending, lost) == (20, None)
        stream = writer.stream
        with penstock.Loader("train", group="stays", batch_size=4, url=url) as stays:
            assert sum(batch.size for batch in stays) == 20
            for partition in stream.partitions:
                trimmer = Trimmer(client, stream, partition, time.monotonic, Confirmer(client, stream, print))
                assert trimmer.trim(load_roster(client, partition), 0, 1000)
        assert left() == (0, 0, 0, (0, 0))
        with writer.epoch(sizes=[10]) as epoch:
            write(epoch, 0, 10)
        assert left() == (10, 10_000, 0, (0, 0))
        take(url, "left", 100, **how, start="remaining")
        assert left() == (0, 0, 0, None)
