"""A trimmer frees what every group has acknowledged, exactly that, and no more than is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from penstock_common.stream.commands import Client
from penstock_common.stream.groups.ledger import acknowledge
from penstock_common.stream.groups.positions import kept_head, report
from penstock_common.stream.groups.roster import Membership, RankOrder, join_group, load_roster
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.streams import Stream
from penstock_producer.write import trimmer as trimming
from penstock_producer.write.trimmer import FAR_S, Trimmer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, sample, stored, writer_of

BLOCK = 4 * SAMPLE_BYTES
SIZES = (20, 12, 1, 8)


class Answers:
    """A confirmer of a stream whose first partition is on a server of its own."""

    def __init__(self) -> None:
        """Confirm everything at first."""
        self.asked: list[Sequence[Any]] = []
        self.is_on_replicas = True

    def are_apart(self, *_: Any) -> bool:
        """See Confirmer."""
        return True

    def question(self, places: Sequence[Any]) -> Answers:
        """See Confirmer."""
        self.asked.append(places)
        return self

    def is_answered(self) -> bool:
        """See Question."""
        return self.is_on_replicas


@pytest.fixture
def stream(any_url: str, any_client: Client) -> Iterator[Stream]:
    """Yield a stream with four shards, in blocks of four samples."""
    with writer_of(any_url, spec=SPEC, block_bytes=BLOCK) as writer:
        join_group(any_client, Membership(writer.stream, "g", "m", "1"))
        epoch = writer.epoch(0, sizes=SIZES)
        for number, size in enumerate(SIZES):
            with epoch.shard(number) as shard:
                for offset in range(size):
                    shard.write(sample(offset))
        yield writer.stream


def trimmer_of(
    client: Client, stream: Stream, answers: Answers | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Trimmer:
    """Return a new trimmer."""
    confirmer = cast("Confirmer", answers) if answers else Confirmer(client, stream, lambda _: None)
    return Trimmer(client, stream, stream.partitions[0], clock, confirmer)


def trained(client: Client, stream: Stream, ends: Sequence[int], group: str = "g") -> None:
    """Acknowledge the samples of each shard below an offset."""
    ranges = {shard: [(0, end)] for shard, end in enumerate(ends) if end}
    assert acknowledge(client, stream.partitions[0], load_manifest(client, stream, 0), group, [], ranges)


def left(client: Client) -> list[list[int]]:
    """Return the offsets of each shard that are still there."""
    found = stored(client, "t", 0)
    return [[offset for offset in range(size) if found[shard, offset]] for shard, size in enumerate(SIZES)]


def test_acknowledged_entries_go_from_the_first_shard_on_until_enough_is_free(
    any_client: Client, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that starts over may read again what is not needed now. Pages and calls have ends of their own."""
    monkeypatch.setattr(trimming, "FIRST_PAGE", 2)
    monkeypatch.setattr(trimming, "CHUNK", 2)
    trained(any_client, stream, (20, 12, 1, 6))
    roster, trimmer = load_roster(any_client, stream.partitions[0]), trimmer_of(any_client, stream)
    assert trimmer.trim(roster, 0, 0) == 0
    assert trimmer.trim(roster, 0, 1) == BLOCK
    assert left(any_client)[0] == list(range(4, 20))
    assert trimmer.trim(roster, 0, 3 * BLOCK) == 3 * BLOCK
    assert left(any_client)[0] == list(range(16, 20))
    assert trimmer.trim(roster, 0, 2 * BLOCK) == 2 * BLOCK
    assert left(any_client)[:2] == [[], list(range(4, 12))]
    assert trimmer.trim(roster, 0, 10**6) == 3 * BLOCK + SAMPLE_BYTES
    assert left(any_client) == [[], [], [], [4, 5, 6, 7]]
    assert trimmer.trim(roster, 0, 10**6) == 0
    trained(any_client, stream, SIZES)
    assert trimmer.trim(roster, 0, 10**6) == BLOCK


def test_entries_beside_others_that_go_stay_until_the_next_time_if_asked_for(
    any_client: Client, stream: Stream
) -> None:
    """A stock server gives neighbours back to the kernel, and new entries need new memory then."""
    trained(any_client, stream, (20, 0, 0, 0))
    roster, trimmer = load_roster(any_client, stream.partitions[0]), trimmer_of(any_client, stream)
    assert trimmer.trim(roster, 0, 10**6, leaves_neighbours=True) == 3 * BLOCK
    assert left(any_client)[0] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert trimmer.trim(roster, 0, 10**6, leaves_neighbours=True) == 2 * BLOCK
    assert left(any_client)[0] == []


def test_what_another_writer_removed_is_not_counted_as_freed(
    any_client: Client, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer would send more than the budget allows. What it needs may be in a later page."""
    monkeypatch.setattr(trimming, "FIRST_PAGE", 3)
    trained(any_client, stream, (20, 0, 0, 0))
    roster, trimmer = load_roster(any_client, stream.partitions[0]), trimmer_of(any_client, stream)
    assert trimmer_of(any_client, stream).trim(roster, 0, 2 * BLOCK) == 2 * BLOCK
    assert trimmer.trim(roster, 0, 2 * BLOCK) == 2 * BLOCK
    assert left(any_client)[0] == [16, 17, 18, 19]


def test_nothing_goes_of_an_epoch_without_a_group_or_of_one_that_is_gone(any_client: Client, stream: Stream) -> None:
    """A group that comes later starts at the first whole epoch."""
    trimmer, roster = trimmer_of(any_client, stream), load_roster(any_client, stream.partitions[0])
    assert trimmer.trim(roster, 7, 1) == 0
    any_client.hdel(stream.partitions[0].roster, "g:g")
    assert trimmer.trim(load_roster(any_client, stream.partitions[0]), 0, 1) == 0
    assert [len(offsets) for offsets in left(any_client)] == [*SIZES]


def test_epochs_that_are_no_longer_there_are_forgotten(any_client: Client, stream: Stream) -> None:
    """A writer of weeks meets thousands of epochs."""
    trimmer, roster = trimmer_of(any_client, stream), load_roster(any_client, stream.partitions[0])
    trimmer.trim(roster, 0, 1)
    trimmer.keep([0, 1])
    assert list(trimmer._memories) == [0]
    trimmer.keep([1])
    assert not trimmer._memories


@pytest.mark.parametrize("kinds", ["shared", "ordered", "both"])
def test_nothing_goes_by_positions_that_another_server_may_lose(any_client: Client, stream: Stream, kinds: str) -> None:
    """After a failover of that server the ranks read from an earlier position, and need these entries."""
    manifest, first = load_manifest(any_client, stream, 0), stream.partitions[0]
    if kinds != "ordered":
        trained(any_client, stream, SIZES)
    else:
        any_client.hdel(first.roster, "g:g", "m:g:m")
    if kinds != "shared":
        rank = Membership(stream, "ranks", "rank-0", "1", RankOrder(0, 1, 4))
        join_group(any_client, rank)
        report(any_client, rank, manifest, sum(SIZES))
    answers, roster = Answers(), load_roster(any_client, first)
    trimmer = trimmer_of(any_client, stream, answers)
    if kinds != "shared":
        answers.is_on_replicas = False
        assert trimmer.trim(roster, 0, 10**6) == 0
        assert [len(offsets) for offsets in left(any_client)] == [*SIZES]
        answers.is_on_replicas = True
    assert trimmer.trim(roster, 0, 10**6) == sum(SIZES) * SAMPLE_BYTES
    assert answers.asked[-1] == ([] if kinds == "shared" else [first])


def test_the_start_of_an_epoch_that_ranks_still_read_stays(any_client: Client, stream: Stream) -> None:
    """It fills their last steps."""
    any_client.hdel(stream.partitions[0].roster, "g:g", "m:g:m")
    rank = Membership(stream, "ranks", "rank-0", "1", RankOrder(0, 1, 1))
    join_group(any_client, rank)
    report(any_client, rank, load_manifest(any_client, stream, 0), 33)
    roster = load_roster(any_client, stream.partitions[0])
    head = kept_head(roster.groups["ranks"])
    assert 0 < head <= 4
    assert trimmer_of(any_client, stream).trim(roster, 0, 10**6) == 7 * BLOCK + SAMPLE_BYTES
    assert left(any_client) == [[0, 1, 2, 3], [], [], list(range(8))]


def test_the_next_shards_of_a_partition_are_looked_at_each_time_and_those_beyond_now_and_then(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan has thousands of shards that are not begun, and most writers begin at the next one."""
    monkeypatch.setattr(trimming, "SHARDS_AT_ONCE", 2)
    now_s = [0.0]
    with writer_of(any_url, spec=SPEC, partitions=2) as writer:
        join_group(any_client, Membership(writer.stream, "g", "m", "1"))
        epoch, stream = writer.epoch(0, sizes=[1] * 16), writer.stream
        trimmer = trimmer_of(any_client, stream, clock=lambda: now_s[0])

        def freed(*shards: int) -> int:
            """Write and acknowledge shards, and return how many samples are freed."""
            for number in shards:
                with epoch.shard(number) as shard:
                    shard.write(sample(number))
            acknowledged = {number: [(0, 1)] for number in shards}
            assert acknowledge(any_client, stream.partitions[0], epoch.manifest, "g", [], acknowledged)
            return trimmer.trim(load_roster(any_client, stream.partitions[0]), 0, 10**6) // SAMPLE_BYTES

        def ledgers_read() -> int:
            return int(any_client.info("commandstats").get("cmdstat_getrange", {"calls": 0})["calls"])

        assert freed(0, 2) == 2
        assert freed(4, 6, 8) == 2, "shard 8 is beyond the next two"
        before = ledgers_read()
        now_s[0] += FAR_S / 2
        assert freed() == 1, "it is one of the next two now"
        assert freed(14) == 0
        assert ledgers_read() == before + 1
        now_s[0] += FAR_S
        assert freed() == 1
