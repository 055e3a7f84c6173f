"""The ledger, on real servers: a set of acknowledged samples, however they are cut, repeated or late."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.entries import list_pending
from penstock_common.stream.groups import ledger
from penstock_common.stream.groups.ledger import (
    MOST_TOGETHER,
    Acknowledgement,
    acknowledge,
    add_dead_letter,
    behind,
    bits_of_shards,
    dead_letters,
    done_bits,
    group_bits,
    runs,
    unacknowledged_samples,
    uncovered,
    whole_ledgers,
)
from penstock_common.stream.groups.positions import kept_head, report
from penstock_common.stream.groups.roster import Membership, RankOrder, join_group, load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import abandon_epoch, load_manifest
from penstock_common.tuning import Tuning
from penstock_producer.write.writer import Writer
from tests.common.stream.test_roster_values import manifest_of
from tests.contracts.feed import SPEC, entries, open_stream, produce, sample, writer_of
from tests.contracts.ordered import plan, planned_writer, write_shard, write_shards


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60)), max_size=8))
def test_bits_are_exactly_the_ranges_that_were_acknowledged(
    any_url: str, any_client: Client, ranges: list[tuple[int, int]]
) -> None:
    """Whole bytes are set in one piece, and the rest bit by bit: no neighbour may change."""
    any_client.flushall()
    produce(any_url, "t", 200)
    stream = open_stream(any_client, "t")
    manifest, partition = load_manifest(any_client, stream, 0), stream.partitions[0]
    join_group(any_client, Membership(stream, "g", "", ""))
    expected = np.zeros(200, dtype=bool)
    for lo, size in ranges:
        hi = min(200, lo + size)
        expected[lo:hi] = True
        assert acknowledge(any_client, partition, manifest, "g", [], {0: [(lo, hi)]})
    assert np.array_equal(done_bits(any_client, partition, 0, "g", 0, 0, 200), expected)
    assert np.array_equal(done_bits(any_client, partition, 0, "g", 0, 13, 101), expected[13:101])
    missing = [n for shard, lo, hi in uncovered(any_client, stream, manifest, "g") for n in range(lo, hi) if shard == 0]
    assert missing == np.flatnonzero(~expected).tolist()


def test_any_part_of_a_ledger_is_read_as_it_is(any_client: Client) -> None:
    """Parts begin and end inside a byte, and a ledger ends with its last acknowledged sample."""
    partition, size = PartitionKeys("t", "tag", 0), 40
    bits = np.zeros(size, dtype=bool)
    for offset in (0, 1, 7, 8, 9, 15, 16, 17, 23, 24, 31):
        bits[offset] = True
        any_client.setbit(partition.ledger(0, "g", 0), offset, 1)
    for lo in range(size):
        for hi in range(lo, size):
            assert np.array_equal(done_bits(any_client, partition, 0, "g", 0, lo, hi), bits[lo:hi]), (lo, hi)


def test_whole_ledgers_are_read_with_their_sizes(any_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit compares every sample with them. A ledger that is longer than its shard was made by another program."""
    monkeypatch.setattr(ledger, "LEDGERS_AT_ONCE", 2)
    partition, lengths = PartitionKeys("t", "tag", 0), {4: 80, 0: 0, 7: 17, 1: 9, 5: 3}
    acknowledged = {4: [0, 71, 72, 79], 7: [16, 31], 1: [8], 0: [0]}
    for shard, offsets in acknowledged.items():
        for offset in offsets:
            any_client.setbit(partition.ledger(2, "g", shard), offset, 1)
    found = whole_ledgers(any_client, partition, 2, "g", lengths)
    assert list(found) == list(lengths)
    assert {shard: nbytes for shard, (_, nbytes) in found.items()} == {4: 10, 0: 1, 7: 4, 1: 2, 5: 0}
    for shard, (bits, _) in found.items():
        expected = [offset in acknowledged.get(shard, []) for offset in range(lengths[shard])]
        assert bits.tolist() == expected, shard


@pytest.mark.parametrize("is_sized", [True, False])
def test_a_group_is_done_with_what_its_ledgers_or_its_positions_say(
    any_url: str, any_client: Client, *, is_sized: bool
) -> None:
    """Retention removes what every group is done with, but not the start of an epoch that an ordered group reads."""
    with writer_of(any_url, spec=SPEC, partitions=2) as writer:
        epoch = writer.epoch(sizes=[40, 30, 20]) if is_sized else writer.epoch()
        for number in range(2):
            write_shard(epoch, number, [40, 30], frozenset())
        stream, manifest = writer.stream, load_manifest(any_client, writer.stream, 0)
    rank = Membership(stream, "ordered", "rank-0", "1", RankOrder(0, 1, 8))
    join_group(any_client, rank)
    join_group(any_client, Membership(stream, "shared", "", ""))
    groups = load_roster(any_client, stream.partitions[0]).groups
    for shard, lo, hi in ((0, 9, 33), (1, 8, 20)):
        acknowledge(any_client, stream.partition_of(shard), manifest, "shared", [], {shard: [(lo, hi)]})
    report(any_client, rank, manifest, 48)
    head = kept_head(groups["ordered"])

    def is_done(group: str, shard: int, offset: int, *, may_go: bool) -> bool:
        if group == "shared":
            return (9 <= offset < 33) if shard == 0 else (8 <= offset < 20)
        return (head if may_go else 0) <= 40 * shard + offset < 48

    for group, record in groups.items():
        for spans, may_go in product(({1: (3, 29), 0: (5, 38)}, {1: (17, 26), 0: (17, 26)}), (False, True)):
            found = bits_of_shards(any_client, stream, manifest, group, record, spans, may_go=may_go)
            assert list(found) == list(spans)
            for shard, (lo, hi) in spans.items():
                expected = [is_done(group, shard, offset, may_go=may_go) for offset in range(lo, hi)]
                assert found[shard].tolist() == expected, (group, shard, may_go)
        alone = group_bits(any_client, stream, manifest, group, record, 0, 0, 40)
        assert alone.tolist() == [is_done(group, 0, offset, may_go=False) for offset in range(40)]


def test_what_lies_behind_an_unfinished_shard_is_not_acknowledged(any_url: str, any_client: Client) -> None:
    """Its position is not known before the shard in front of it has ended."""
    with planned_writer(any_url, block_samples=5) as writer:
        epoch = writer.epoch()
        for shard in (epoch.shard(0), epoch.shard(1)):
            for number in range(5):
                shard.write(sample(number))
            shard.commit_all()
            shard.abort()
        stream, manifest = writer.stream, load_manifest(any_client, writer.stream, 0)
    rank = Membership(stream, "g", "rank-0", "1", RankOrder(0, 1, 4))
    join_group(any_client, rank)
    report(any_client, rank, manifest, 4)
    record = load_roster(any_client, stream.partitions[0]).groups["g"]
    assert behind(any_client, stream, manifest, "g", record) == [(0, 4, 5), (1, 0, 5)]


def test_shards_without_a_sample_are_missed_whole(any_url: str, any_client: Client) -> None:
    """They are not committed yet, or were lost, and those between them are compared sample by sample."""
    with writer_of(any_url, spec=SPEC, partitions=2) as writer:
        epoch = writer.epoch(sizes=[10] * 5)
        write_shards(epoch, [1, 3], [10] * 5, frozenset())
        stream, manifest = writer.stream, load_manifest(any_client, writer.stream, 0)
    join_group(any_client, Membership(stream, "g", "", ""))
    groups = load_roster(any_client, stream.partitions[0]).groups
    acknowledge(any_client, stream.partition_of(1), manifest, "g", [], {1: [(0, 10)]})
    acknowledge(any_client, stream.partition_of(3), manifest, "g", [], {3: [(0, 4), (5, 9)]})
    missing = [(0, 0, 10), (2, 0, 10), (3, 4, 5), (3, 9, 10), (4, 0, 10)]
    assert uncovered(any_client, stream, manifest, "g") == missing
    assert uncovered(any_client, stream, manifest, "nobody") == [(shard, 0, 10) for shard in range(5)]
    assert unacknowledged_samples(any_client, stream, manifest, groups) == {"g": 2}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 99), st.integers(1, 60)), min_size=1, max_size=8))
def test_acknowledgements_that_are_sent_together_set_the_same_bits(
    any_url: str, any_client: Client, ranges: list[tuple[int, int, int]]
) -> None:
    """They come from batches in any order, of several shards, and may overlap after a repetition."""
    any_client.flushall()
    with Writer("t", url=any_url, spec=SPEC) as writer:
        writer.epoch(sizes=[160, 160])
    stream = open_stream(any_client, "t")
    manifest, partition = load_manifest(any_client, stream, 0), stream.partitions[0]
    join_group(any_client, Membership(stream, "g", "", ""))
    expected = np.zeros((2, 160), dtype=bool)
    every = []
    for shard, lo, size in ranges:
        expected[shard, lo : lo + size] = True
        every.append(Acknowledgement(partition, manifest, "g", [], {shard: [(lo, min(160, lo + size))]}))
    first, *others = every
    assert [first.add(other) for other in others] == [True] * len(others)
    run_script(any_client, *first.call())
    for shard in (0, 1):
        assert np.array_equal(done_bits(any_client, partition, 0, "g", shard, 0, 160), expected[shard])


def test_one_call_acknowledges_one_epoch_of_one_partition_and_so_many_entries(any_url: str, any_client: Client) -> None:
    """The keys of a call must be in one slot, and a server answers no other client during a call."""
    with Writer("t", url=any_url, spec=SPEC, partitions=2) as writer:
        manifests = [writer.epoch().manifest for _ in range(2)]
    first, other = open_stream(any_client, "t").partitions

    def due(partition: PartitionKeys, epoch: int, count: int) -> Acknowledgement:
        return Acknowledgement(partition, manifests[epoch], "g", [b"%d-0" % number for number in range(count)], {})

    assert not due(first, 0, 1).add(due(other, 0, 1))
    assert not due(first, 0, 1).add(due(first, 1, 1))
    assert not due(first, 0, MOST_TOGETHER).add(due(first, 0, 1))
    assert not due(first, 0, 1).add("another thing")
    both = due(first, 0, 1)
    assert both.add(due(first, 0, 2))
    assert both.ids == [b"0-0", b"0-0", b"1-0"]


def test_ranges_that_touch_are_sent_as_one() -> None:
    """A call for hundreds of small batches is then as short as one for a large one."""
    partition, manifest = PartitionKeys("t", "tag", 0), manifest_of((20, 20, 20))
    due = Acknowledgement(partition, manifest, "g", [b"1-0"], {0: [(0, 4)]})
    for ranges in ({0: [(9, 14)], 1: [(3, 5)]}, {0: [(4, 8)], 2: [(6, 8)]}, {2: [(2, 6)]}):
        assert due.add(Acknowledgement(partition, manifest, "g", [b"2-0"], ranges))
    keys = [partition.state(0), partition.entries(0), *(partition.ledger(0, "g", shard) for shard in range(3))]
    spans = [2, 0, 8, 9, 14, 1, 3, 5, 1, 2, 8]
    assert due.call()[1:] == (keys, ["live:id0", "g", 4, b"1-0", b"2-0", b"2-0", b"2-0", *spans])


def test_an_epoch_that_is_no_longer_live_takes_no_acknowledgement(url: str, client: Client) -> None:
    """A late trainer must not write keys of a released epoch, because nothing would remove them."""
    with Writer("t", url=url, spec=SPEC) as writer:
        writer.epoch()
    stream = open_stream(client, "t")
    manifest, partition = load_manifest(client, stream, 0), stream.partitions[0]
    join_group(client, Membership(stream, "g", "", ""))
    abandon_epoch(client, stream, 0)
    before = set(client.keys("*"))
    assert not acknowledge(client, partition, manifest, "g", [b"1-0"], {0: [(0, 5)]})
    assert not add_dead_letter(client, partition, manifest, "g", b"1-0", "bad")
    assert set(client.keys("*")) == before


def test_dead_letters_and_holes_are_covered_and_the_rest_is_named(any_url: str, any_client: Client) -> None:
    """An epoch closes when every sample is done, and missing samples are named."""
    with Writer("t", url=any_url, spec=SPEC, tuning=Tuning(block_bytes=240), partitions=2) as writer:
        epoch = writer.epoch(sizes=[20, 20])
        for number in range(2):
            with epoch.shard(number) as shard:
                for offset in range(20):
                    if offset == 3:
                        shard.quarantine("bad")
                    else:
                        shard.write({"x": np.zeros(4, np.float32), "y": offset})
    stream = open_stream(any_client, "t")
    manifest = load_manifest(any_client, stream, 0)
    for group in ("g", "other"):
        join_group(any_client, Membership(stream, group, "", ""))
    assert uncovered(any_client, stream, manifest, "g") == [(0, 0, 3), (0, 4, 20), (1, 0, 3), (1, 4, 20)]
    assert acknowledge(any_client, stream.partitions[0], manifest, "g", [], {0: [(0, 3), (4, 20)]})
    last = any_client.xrevrange(stream.partitions[1].entries(0), count=1)[0][0]
    assert add_dead_letter(any_client, stream.partitions[1], manifest, "g", last, "ChecksumMismatch: x")
    assert dead_letters(any_client, stream.partitions[1], 0, "g") == {last: "ChecksumMismatch: x"}
    assert uncovered(any_client, stream, manifest, "g") == [(1, 0, 3), (1, 4, 11)]
    assert len(uncovered(any_client, stream, manifest, "other")) == 4


@pytest.mark.parametrize("count", [0, 1, 25])
def test_all_that_is_pending_is_listed(
    any_url: str, any_client: Client, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member with tiny entries holds more of them than fit one answer, and none may be overlooked."""
    monkeypatch.setattr("penstock_common.stream.entries.PENDING_PAGE", 5)
    produce(any_url, "t", 30, block_samples=1)
    stream = open_stream(any_client, "t")
    join_group(any_client, Membership(stream, "g", "", ""))
    key = stream.partitions[0].entries(0)
    if count:
        any_client.xreadgroup("g", "m", {key: ">"}, count=count)
    assert list_pending(any_client, stream.partitions[0], 7, "g") == []  # an epoch that was released since
    listed = [entry.entry_id for entry in list_pending(any_client, stream.partitions[0], 0, "g")]
    assert listed == [entry_id for entry_id, _ in entries(any_client, "t", 0)][:count]


def test_runs_of_nothing_are_nothing() -> None:
    """Most batches acknowledge whole entries, and some acknowledge none."""
    assert runs([]) == []
    assert runs([3, 4, 5, 9]) == [(3, 6), (9, 10)]
    assert runs(np.array([0, 2, 3, 8, 9])) == [(0, 1), (2, 4), (8, 10)]


def test_a_shard_that_every_rank_is_through_with_misses_nothing(any_url: str, any_client: Client) -> None:
    """An empty range would keep an epoch open whose samples are all acknowledged."""
    with writer_of(any_url, spec=SPEC) as writer:
        epoch = writer.epoch(sizes=[8, 8])
        for number in range(2):
            with epoch.shard(number) as shard:
                for offset in range(8):
                    shard.write({"x": np.zeros(4, np.float32), "y": offset})
    stream = open_stream(any_client, "t")
    manifest = load_manifest(any_client, stream, 0)
    rank = Membership(stream, "g", "rank-0", "1", RankOrder(0, 1, 4))
    join_group(any_client, rank)
    for position, missing in ((4, [(0, 4, 8), (1, 0, 8)]), (8, [(1, 0, 8)]), (12, [(1, 4, 8)]), (16, [])):
        report(any_client, rank, manifest, position)
        assert uncovered(any_client, stream, manifest, "g") == missing


def test_what_a_group_has_not_acknowledged_is_told_by_shard_and_in_total(any_url: str, any_client: Client) -> None:
    """A full budget is explained by it, and a wait that can never end is found by it."""
    plan(any_url, [10, 10, 10], block_samples=5, partitions=2)
    stream = open_stream(any_client, "t")
    manifest = load_manifest(any_client, stream, 0)
    rank = Membership(stream, "g", "rank-0", "1", RankOrder(0, 1, 4))
    join_group(any_client, rank)
    join_group(any_client, Membership(stream, "shared", "", ""))
    groups = load_roster(any_client, stream.partitions[0]).groups
    for position, left in (
        (0, [(0, 0, 10), (1, 0, 10), (2, 0, 10)]),
        (4, [(0, 4, 10), (1, 0, 10), (2, 0, 10)]),
        (10, [(1, 0, 10), (2, 0, 10)]),
        (12, [(1, 2, 10), (2, 0, 10)]),
        (29, [(2, 9, 10)]),
        (30, []),
    ):
        if position:
            report(any_client, rank, manifest, position)
        assert sorted(behind(any_client, stream, manifest, "g", groups["g"])) == left
        told = unacknowledged_samples(any_client, stream, manifest, groups)
        assert told == {"g": 30 - position, "shared": 30}
    acknowledge(any_client, stream.partition_of(1), manifest, "shared", [], {1: [(2, 9)]})
    assert unacknowledged_samples(any_client, stream, manifest, groups) == {"g": 0, "shared": 23}
