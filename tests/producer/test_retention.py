"""Retention: the plans as pure functions, and on real servers what goes, what stays, and that the books agree."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cpu import page_faults
from benchmarks.stock import StockServer
from penstock import EmbeddedServer
from penstock_common.errors import EpochNotFound, EpochsReleased, ReplayTruncated, WaitTimeout
from penstock_common.server.scripts import load_script
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.entries import IndexRecord
from penstock_common.stream.groups.ledger import acknowledge
from penstock_common.stream.groups.roster import GroupRecord, Membership, Roster, expire_silent, join_group, load_roster
from penstock_common.stream.manifest import load_manifest, retained_epochs
from penstock_common.stream.ranges import add_to_ranges, format_ranges, parse_ranges
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.cleaner import Cleaner
from penstock_producer.write.retention import (
    EpochFacts,
    is_acknowledged,
    plan_release,
    plan_trim,
    trimming_groups,
)
from penstock_producer.write.trimmer import Trimmer
from penstock_producer.write.writer import Writer
from tests.contracts.feed import accounted_bytes, open_stream, payload_bytes
from tests.tuned import tuned

WIDE = {"x": ("uint8", (1000,)), "y": ("int64", ())}
BYTES = 1008
BUDGET = 100 * BYTES


def group(first: int = 0, *, holds: bool = True) -> GroupRecord:
    """A group as a roster knows it."""
    return GroupRecord(first=first, declared=False, holds=holds, seen_ms=0, read=-1, lost=None)


def roster_of(groups: dict[str, GroupRecord], closed: set[tuple[str, int]] = set(), **fields: Any) -> Roster:  # noqa: B006
    """A roster of these groups."""
    return Roster("1", groups=groups, closed=frozenset(closed), **fields)


class TestPlans:
    """Values alone decide which epochs may be removed."""

    facts = tuple(EpochFacts(epoch, "produced", 10) for epoch in range(4))

    def test_the_oldest_acknowledged_epochs_go_until_there_is_room(self) -> None:
        """Replay wants the latest epochs, so the oldest go, and no more than needed."""
        roster = roster_of({"a": group(), "b": group()}, {(g, e) for g in "ab" for e in range(3)})
        assert plan_release(self.facts, roster, 0, 11) == [0, 1]
        assert plan_release(self.facts, roster, 0, 20) == [0, 1]
        assert plan_release(self.facts, roster, 0, 100) == [0, 1, 2]
        assert plan_release(self.facts, roster, 0, 0) == []

    def test_what_one_group_owes_stays(self) -> None:
        """Every group sees every sample, however slow it is."""
        roster = roster_of({"a": group(), "b": group()}, {("a", 0), ("a", 1), ("b", 1)})
        assert list(roster.unacknowledged_by(0)) == ["b"]
        assert plan_release(self.facts, roster, 0, 100) == [1]

    def test_without_any_group_nothing_is_acknowledged(self) -> None:
        """A producer that was started first must keep samples that no group could read yet."""
        assert plan_release(self.facts, roster_of({}), 0, 100) == []
        assert not is_acknowledged(roster_of({"gone": group(holds=False)}), 0)

    def test_a_group_that_came_late_or_left_holds_nothing_before_it(self) -> None:
        """A group owes from its first epoch on, and while it holds."""
        roster = roster_of({"a": group(), "late": group(2), "left": group(holds=False)}, {("a", 0), ("a", 1), ("a", 2)})
        assert plan_release(self.facts, roster, 0, 100) == [0, 1]

    def test_a_replayed_epoch_stays_while_its_lease_lasts(self) -> None:
        """A replay must not lose its ground, and a dead one must not hold it for ever."""
        roster = roster_of({"a": group()}, {("a", 0), ("a", 1)}, replays={"r": (0, 1000)})
        assert plan_release(self.facts, roster, 999, 100) == [1]
        assert plan_release(self.facts, roster, 1000, 100) == [0, 1]

    def test_abandoned_epochs_go_first_and_unfinished_ones_never(self) -> None:
        """No group needs an epoch that will never be complete."""
        facts = [EpochFacts(0, "produced", 10), EpochFacts(1, "sized", 10), EpochFacts(2, "abandoned", 10)]
        roster = roster_of({"a": group()}, {("a", 0), ("a", 1)})
        assert plan_release(facts, roster, 0, 5) == [2]
        assert plan_release(facts, roster, 0, 100) == [2, 0]

    def test_entries_go_when_every_group_has_acknowledged_all_of_them(self) -> None:
        """A block half read, or read by half the groups, is still owed."""
        records = [IndexRecord(10 * (n + 1), b"%d-0" % n, 10 * n, 10, 100, ()) for n in range(5)]
        a, b = np.ones(50, dtype=bool), np.ones(50, dtype=bool)
        b[25] = False
        a[49] = False
        assert [r.first for r in plan_trim(records, [a, b], 1000)] == [0, 10, 30]
        assert [r.first for r in plan_trim(records, [a, b], 101)] == [0, 10]
        assert plan_trim(records, [a[:5], b], 1000) == []

    def test_holes_owe_nothing(self) -> None:
        """A sample that could not be made is acknowledged for everyone."""
        record = IndexRecord(10, b"1-0", 0, 8, 100, (3, 9))
        bits = np.ones(10, dtype=bool)
        bits[[3, 9]] = False
        assert plan_trim([record], [bits], 1) == [record]
        bits[4] = False
        assert plan_trim([record], [bits], 1) == []
        assert plan_trim([IndexRecord(10, b"", 0, 0, 0, tuple(range(10)))], [bits], 1) == []

    def test_bits_may_begin_behind_what_is_removed(self) -> None:
        """The ledger below that offset is not read again, and what lies behind it must not be mixed up."""
        records = [IndexRecord(n + 10, b"1-1", n, 9, 100, (n + 3,)) for n in (20, 30, 40)]
        bits = np.ones(30, dtype=bool)
        bits[[3, 13, 15, 23]] = False
        assert [r.first for r in plan_trim(records, [bits], 1000, base=20)] == [20, 40]
        assert [r.first for r in plan_trim(records, [bits[:25]], 1000, base=20)] == [20]

    def test_of_two_neighbours_one_stays_until_the_memory_of_the_other_is_used_again(self) -> None:
        """Freed neighbours are one piece, and a stock server gives large pieces back to the kernel."""
        records = [IndexRecord(first + 10, b"1-1", first, 10, 10, ()) for first in range(0, 60, 10)]
        bits = np.ones(60, bool)
        bits[30:40] = False

        def plan(gone: set[int], gone_before: set[int] | None) -> list[int]:
            return [r.first for r in plan_trim(records, [bits], 1000, gone=gone, gone_before=gone_before)]

        assert plan(set(), None) == [0, 10, 20, 40, 50]
        assert plan(set(), set()) == [0, 20, 40]
        assert plan({10, 30, 50}, set()) == []
        assert plan({10, 30, 50}, {10, 30, 50}) == [10, 50]

    def test_a_large_epoch_is_trimmed_before_it_is_released(self) -> None:
        """A trim frees its entries individually. An abandoned epoch has no samples for any group."""
        roster = roster_of({"a": group()}, {("a", e) for e in range(4)})
        facts = [EpochFacts(0, "produced", 10), EpochFacts(1, "produced", 5), EpochFacts(2, "abandoned", 10)]
        assert plan_release(facts, roster, 0, 100, most_bytes=9) == [2, 1]
        assert plan_release(facts, roster, 0, 100, most_bytes=10) == [2, 0, 1]
        assert plan_release(facts, roster, 0, 100) == [2, 0, 1]

    def test_a_group_that_is_through_trims_by_the_others(self) -> None:
        """Only those that still read an epoch decide about its entries."""
        roster = roster_of({"a": group(), "b": group(), "left": group(holds=False), "late": group(3)}, {("a", 0)})
        assert trimming_groups(roster, 0) == ["b"]
        assert trimming_groups(roster_of({"a": group(1), "left": group(holds=False)}, {("a", 1)}), 1) == ["a"]
        assert trimming_groups(roster_of({}), 0) == []
        assert trimming_groups(roster_of({"later": group(1), "left": group(holds=False)}), 0) == []


@given(st.sets(st.integers(0, 60)))
def test_ranges_remember_exactly_what_was_added(numbers: set[int]) -> None:
    """Released epochs are remembered for ever in a few bytes, whatever the order they went in."""
    text = ""
    for number in sorted(numbers, key=lambda n: n * 37 % 61):
        text = add_to_ranges(text, number)
    ranges = parse_ranges(text)
    assert {n for low, high in ranges for n in range(low, high + 1)} == numbers
    assert format_ranges(ranges) == text
    assert all(high + 1 < low for (_, high), (low, _) in pairwise(ranges))


# --- on a server ------------------------------------------------------------------------------------------------------


@contextmanager
def writer_of(url: str, **settings: Any) -> Iterator[Writer]:
    """A quiet writer of 't' with ten samples an entry, that waits for space one second at most."""
    defaults: dict[str, Any] = {"spec": WIDE, "block_bytes": 10 * BYTES, "budget_bytes": BUDGET, "room_wait_s": 1.0}
    with Writer("t", url=url, **tuned("Writer", {**defaults, **settings}, Tuning(notify=lambda _: None))) as writer:
        yield writer


def write_epoch(writer: Writer, count: int) -> None:
    """One more epoch."""
    with writer.epoch() as epoch:
        for number in range(count):
            epoch.write({"x": np.full(1000, number % 256, np.uint8), "y": number})


@contextmanager
def loader_of(url: str, name: str, **settings: Any) -> Iterator[Loader]:
    """A quiet loader of 't'."""
    with Loader(
        "t",
        group=name,
        batch_size=10,
        url=url,
        **tuned("Loader", settings, Tuning(notify=lambda _: None, timeout_s=10)),
    ) as loader:
        yield loader


def read(loader: Loader) -> list[int]:
    """The next epoch's numbers, sorted."""
    return sorted(number for batch in loader for number in batch["y"].tolist())


def read_all(loader: Loader) -> list[int]:
    """The next epoch's numbers, sorted, each batch acknowledged."""
    found: list[int] = []
    for batch in loader:
        found += batch["y"].tolist()
        loader.acknowledge(batch)
    return sorted(found)


def require_exact_books(client: Client) -> None:
    """The rosters' bytes are those of the entries that are there, epoch by epoch."""
    stream = open_stream(client, "t")
    total, by_epoch = accounted_bytes(client, "t")
    there = {epoch: payload_bytes(client, "t", epoch) for epoch in retained_epochs(client, stream)}
    assert by_epoch == {epoch: by_epoch.get(epoch, 0) for epoch in there if epoch in by_epoch}
    assert {epoch: nbytes for epoch, nbytes in by_epoch.items() if nbytes} == {e: n for e, n in there.items() if n}
    assert total == sum(there.values())


@pytest.mark.parametrize("partitions", [1, 2])
def test_the_oldest_acknowledged_epochs_make_space_and_counts_agree(url: str, client: Client, partitions: int) -> None:
    """Everything is kept until space is needed; then the oldest goes, whole, with all its keys."""
    with (
        writer_of(url, partitions=partitions, budget_bytes=partitions * BUDGET) as writer,
        loader_of(url, "g") as loader,
    ):
        for epoch in range(9):
            write_epoch(writer, 20)
            assert read(loader) == list(range(20))
            if epoch == 3:
                assert list(retained_epochs(client, writer.stream)) == [0, 1, 2, 3]
        kept = list(retained_epochs(client, writer.stream))
        assert kept == list(range(kept[0], 9))
        assert 0 < kept[0] <= 6
    require_exact_books(client)
    assert not [key for key in client.keys("*") for gone in range(kept[0]) if b"}:%d:" % gone in key]
    with pytest.raises(EpochNotFound, match=f"retained epochs: {kept[0]}, "):
        Replay("t", url=url, epoch=0, batch_size=1)


def test_an_epoch_larger_than_the_budget_passes_through(url: str, client: Client) -> None:
    """Entries that every group has acknowledged go while their epoch is still written."""
    with writer_of(url, room_wait_s=None) as writer, loader_of(url, "a", prefetch_bytes=1) as a:
        epoch = writer.epoch()
        found: list[int] = []
        batches: Any = None
        for number in range(500):
            epoch.write({"x": np.zeros(1000, np.uint8), "y": number})
            if number % 10 == 9 and number >= 20:
                batches = batches or iter(a)
                found += next(batches)["y"].tolist()
        epoch.close()
        found += [number for batch in batches for number in batch["y"].tolist()]
        assert sorted(found) == list(range(500))
        assert payload_bytes(client, "t", 0) <= BUDGET
    require_exact_books(client)
    with pytest.raises(ReplayTruncated), Replay("t", url=url, epoch=0, batch_size=10) as replay:
        list(replay)


def test_a_late_group_starts_at_the_first_whole_epoch(any_url: str) -> None:
    """It must not be shown an epoch that has gaps."""
    with writer_of(any_url) as writer, loader_of(any_url, "early") as early:
        write_epoch(writer, 60)
        for batch in early:
            if batch["y"].max() >= 29:
                break
        next(iter(early))
        with writer.epoch() as second:  # needs quota: entries of epoch 0 go, though it is not read to its end
            for number in range(45):
                second.write({"x": np.zeros(1000, np.uint8), "y": number})
        assert load_roster(writer.client, writer.stream.partitions[0]).trimmed == {0}
        with loader_of(any_url, "late") as late:
            assert {batch.epoch for batch in late} == {1}


def test_a_replay_keeps_its_epoch(any_url: str, any_client: Client) -> None:
    """Production continues during a replay, and frees other epochs than this one."""
    with writer_of(any_url) as writer, loader_of(any_url, "g") as loader:
        for _ in range(3):
            write_epoch(writer, 20)
            read(loader)
        with Replay("t", url=any_url, epoch=1, batch_size=3) as replay:
            again = iter(replay)
            first = next(again)["y"].tolist()
            for _ in range(6):
                write_epoch(writer, 20)
                read(loader)
            assert 1 in retained_epochs(any_client, writer.stream)
            assert 0 not in retained_epochs(any_client, writer.stream)
            assert first + [n for batch in again for n in batch["y"].tolist()] == list(range(20))
            assert [n for batch in replay for n in batch["y"].tolist()] == list(range(20))
        for _ in range(4):
            write_epoch(writer, 20)
            read(loader)
        assert 1 not in retained_epochs(any_client, writer.stream)


def test_a_group_that_left_holds_nothing_and_is_told_what_it_missed(any_url: str) -> None:
    """An experiment that ended must not stop production; if it comes back, it must know that there is a gap."""
    with writer_of(any_url) as writer:
        write_epoch(writer, 20)
        with loader_of(any_url, "left") as left:
            read(left)
        with loader_of(any_url, "stays") as stays:
            for _ in range(8):
                write_epoch(writer, 20)
                while read(stays) and stays.stats(total=True).samples % 20:
                    pass
            with pytest.raises(EpochsReleased, match=r"'left'.*epochs 1-\d+.*start="), loader_of(any_url, "left"):
                pass
            with loader_of(any_url, "left", start="earliest") as back:
                assert read(back) == list(range(20))


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_a_group_that_lost_an_epoch_goes_on_where_it_stands(any_url: str, any_client: Client, order: str) -> None:
    """To read again would skip the rest of an epoch whose read half is trimmed, or call that half lost."""
    settings: dict[str, Any] = {"acknowledge": "manual", "prefetch_bytes": 20 * BYTES}
    if order != "shared":
        settings["order"] = order
    with writer_of(any_url, budget_bytes=240 * BYTES, room_wait_s=10) as writer:
        for _ in range(2):
            write_epoch(writer, 90)
        with loader_of(any_url, "left", **settings) as left:
            for batch in itertools.islice(left, 5):
                left.acknowledge(batch)
            write_epoch(writer, 90)
        assert load_roster(any_client, writer.stream.partitions[0]).trimmed
        release_epoch(any_client, writer.stream, 1)
        with pytest.raises(EpochsReleased, match=r"epochs 1-1 .* give start='remaining'"):
            Loader("t", group="left", batch_size=10, url=any_url, **tuned("Loader", settings, Tuning()))
        with loader_of(any_url, "left", **settings, start="remaining") as back:
            assert [read_all(back) for _ in range(2)] == [list(range(50, 90)), list(range(90))]
        told = "has read epochs 0,2 of 't'"
        with loader_of(any_url, "left", **settings, timeout_s=1) as again, pytest.raises(WaitTimeout, match=told):
            read(again)


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_a_group_goes_on_without_an_epoch_that_it_lost_in_part(
    any_url: str, any_client: Client, order: str, partitions: int
) -> None:
    """The rest of a trimmed epoch would be trained on, and then end with samples that nobody can give."""
    settings: dict[str, Any] = {"prefetch_bytes": 20 * BYTES} | ({} if order == "shared" else {"order": order})
    with writer_of(any_url, partitions=partitions, budget_bytes=500 * BYTES) as writer:
        stream = writer.stream

        def write(samples: int) -> None:
            with writer.epoch(sizes=[samples] * partitions) as epoch:
                for number in range(partitions):
                    with epoch.shard(number) as shard:
                        for offset in range(samples):
                            shard.write({"x": np.zeros(1000, np.uint8), "y": offset})

        write(10)
        with loader_of(any_url, "left", **settings) as left:
            assert len(read_all(left)) == 10 * partitions
        with loader_of(any_url, "other") as other:
            assert len(read_all(other)) == 10 * partitions
            for _ in range(2):
                write(10)
                assert len(read_all(other)) == 10 * partitions
            release_epoch(any_client, stream, 1)
            last = stream.partitions[-1]  # it alone is trimmed, and the others learn of it
            trimmer = Trimmer(any_client, stream, last, time.monotonic, Confirmer(any_client, stream, print))
            assert trimmer.trim(load_roster(any_client, last), 2, BYTES)
            write(10)
            with pytest.raises(EpochsReleased, match=r"start='remaining'"), loader_of(any_url, "left", **settings):
                pass
            with loader_of(any_url, "left", **settings, start="remaining") as back:
                assert {batch.epoch for batch in back} == {3}
            assert all(load_roster(any_client, one).groups["left"].first == 3 for one in stream.partitions)
        assert audit_stream(any_client, stream).is_clean


def test_a_declared_group_holds_what_it_has_not_read(any_url: str, any_client: Client) -> None:
    """A trainer that runs at night is declared once, and production waits for it."""
    with writer_of(any_url, room_wait_s=0.1) as writer:
        join_group(any_client, Membership(writer.stream, "night", "", ""), declared=True)
        with loader_of(any_url, "day") as day:
            for _ in range(3):
                write_epoch(writer, 20)
                read(day)
            with pytest.raises(TimeoutError, match="because of group night"):
                for _ in range(3):
                    write_epoch(writer, 20)
        with loader_of(any_url, "night") as night:
            assert read(night) == list(range(20))
            write_epoch(writer, 20)


def test_a_group_that_vanished_stops_holding_after_a_while(any_url: str, any_client: Client) -> None:
    """Without this, a killed trainer that is not restarted would stop production for ever."""
    with writer_of(any_url) as writer:
        join_group(any_client, Membership(writer.stream, "dead", "m", "1"))
        join_group(any_client, Membership(writer.stream, "declared", "m", "1"), declared=True)
        partition = writer.stream.partitions[0]
        assert expire_silent(any_client, partition, 10**9) == []
        assert load_roster(any_client, partition).groups["dead"].holds
        while load_roster(any_client, partition).members:  # each in its own millisecond
            expire_silent(any_client, partition, 1)
        roster = load_roster(any_client, partition)
        assert not roster.groups["dead"].holds
        assert roster.groups["declared"].holds


def test_rosters_that_changed_unequally_do_not_stop_releases(any_url: str, any_client: Client) -> None:
    """A trainer killed while it joined is on one partition's roster and not on the other's."""
    with writer_of(any_url, partitions=2, budget_bytes=2 * BUDGET) as writer, loader_of(any_url, "g") as loader:
        any_client.hincrby(writer.stream.partitions[1].roster, "gen", 5)
        for _ in range(6):
            epoch = writer.epoch(sizes=[20, 20])
            for number in range(2):
                with epoch.shard(number) as shard:
                    for offset in range(20):
                        shard.write({"x": np.zeros(1000, np.uint8), "y": offset})
            assert len(read(loader)) == 40
        assert 0 not in retained_epochs(any_client, writer.stream)
    require_exact_books(any_client)


def test_a_release_that_was_cut_short_is_finished_by_the_next(any_url: str, any_client: Client) -> None:
    """Its author died after the first partition: the bytes of the others must not be counted for ever."""
    with writer_of(any_url, partitions=2, budget_bytes=2 * BUDGET) as writer, loader_of(any_url, "g") as loader:
        stream = writer.stream
        for _ in range(2):
            epoch = writer.epoch(sizes=[20, 20])
            for number in range(2):
                with epoch.shard(number) as shard:
                    for offset in range(20):
                        shard.write({"x": np.zeros(1000, np.uint8), "y": offset})
            read(loader)
        manifest = load_manifest(any_client, stream, 0)
        first = stream.partitions[0]
        run_script(any_client, load_script("retire_epoch"), [first.roster, first.state(0)], ["", 0, manifest.id])
        for partition in (1, 0):
            Cleaner(any_client, stream, lambda _: None).free_bytes(stream.partitions[partition], 1)
        assert list(retained_epochs(any_client, stream)) in ([1], [])
        assert load_roster(any_client, first).groups["g"].lost is None
        assert not load_roster(any_client, first).retiring
        assert not [key for key in any_client.keys("*") if b"}:0:" in key]
    require_exact_books(any_client)


def test_one_held_entry_does_not_keep_what_lies_behind_it(any_url: str, any_client: Client) -> None:
    """A slow member, or a rank that pads its last step with the first samples, holds little; writers need the rest."""
    with Writer("t", url=any_url, spec=WIDE, tuning=Tuning(block_bytes=BYTES), budget_bytes=BUDGET) as writer:
        epoch = writer.epoch(sizes=[60])
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        with epoch.shard(0) as shard:
            for offset in range(60):
                shard.write({"x": np.zeros(1000, np.uint8), "y": offset})
    stream = open_stream(any_client, "t")
    acknowledge(any_client, stream.partitions[0], load_manifest(any_client, stream, 0), "g", [], {0: [(1, 60)]})
    cleaner, partition = Cleaner(any_client, stream, lambda _: None), stream.partitions[0]
    freed = [cleaner.free_bytes(partition, 1) // BYTES for _ in range(6)]
    assert freed[:4] == [11, 11, 11, 11]
    assert sum(freed) == 59
    assert cleaner.free_bytes(partition, 1) == 0


@pytest.mark.parametrize("is_stock", [True, False])
def test_only_a_server_that_gives_memory_back_is_freed_entry_by_entry(tmp_path: Path, is_stock: bool) -> None:
    """Each removed entry costs its writer CPU, and a tuned server gains nothing by it."""
    quiet, rows = Tuning(notify=lambda _: None), np.zeros((40, 1_000_000), np.uint8)
    with (
        StockServer(tmp_path) if is_stock else EmbeddedServer() as server,
        redis.Redis.from_url(server.url) as client,
    ):
        if not client.info("memory")["mem_allocator"].startswith("jemalloc"):
            pytest.skip("this server has another allocator than jemalloc")
        with (
            Writer(
                "t", url=server.url, spec={"x": ("uint8", (1_000_000,))}, budget_bytes=90_000_000, tuning=quiet
            ) as writer,
            Loader("t", url=server.url, group="g", batch_size=8, tuning=quiet) as loader,
        ):
            for _ in range(3):
                with writer.epoch() as epoch:
                    epoch.write_batch({"x": rows})
                assert sum(len(batch["x"]) for batch in loader) == len(rows)
        removals = client.info("commandstats").get("cmdstat_xdel", {"calls": 0})["calls"]
    assert (removals > 10) == is_stock  # a writer tries the command as it starts


def test_a_stock_server_uses_freed_memory_again(tmp_path: Path) -> None:
    """The allocator gives 8 MB in one piece back to the kernel at once, and new pages cost as much as two copies."""
    spec, samples, epochs = {"x": ("uint8", (1_000_000,))}, 40, 8
    with StockServer(tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            if not client.info("memory")["mem_allocator"].startswith("jemalloc"):
                pytest.skip("this server has another allocator than jemalloc")
        quiet = Tuning(notify=lambda _: None)
        with (
            Writer("t", url=server.url, spec=spec, budget_bytes=100_000_000, tuning=quiet) as writer,
            Loader("t", url=server.url, group="g", batch_size=8, tuning=quiet) as loader,
        ):
            for number in range(epochs):
                if number == epochs // 2:
                    before = page_faults([server.pid])
                with writer.epoch() as epoch:
                    for _ in range(samples):
                        epoch.write({"x": np.zeros(1_000_000, np.uint8)})
                assert sum(len(batch["x"]) for batch in loader) == samples
        pages = samples * (epochs // 2) * 1_000_000 / os.sysconf("SC_PAGE_SIZE")
        assert page_faults([server.pid]) - before < 0.2 * pages  # 0.32 of them if neighbours go together, else 0.1
