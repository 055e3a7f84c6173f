"""The parts of a shared reader, each alone with a real server: its clock, its waits, and the claim of its member."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_common.errors import BadEntry, DamagedKey, WaitTimeout
from penstock_common.stream.commands import Client, server_ms
from penstock_common.stream.groups.ledger import acknowledge
from penstock_common.stream.groups.losses import LossDetector, ServerRuns
from penstock_common.stream.groups.outbox import Outboxes
from penstock_common.stream.groups.presence import new_incarnation
from penstock_common.stream.groups.roster import Membership, RankOrder, beat, join_group, load_roster, rank_member
from penstock_common.stream.keys import RELEASED
from penstock_common.stream.manifest import abandon_epoch, load_manifest
from penstock_common.stream.removal.deletion import release_epoch
from penstock_consumer.read import claims, shared
from penstock_consumer.read.claims import LeaseClaim, RankClaim
from penstock_consumer.read.fetch_plan import FetchPlanner
from penstock_consumer.read.heartbeat import ClaimedEntry
from penstock_consumer.read.ordered import OrderedReader, RowPlan
from penstock_consumer.read.receive import CommitCheck, DeliveryCheck, ReceivedEntry
from penstock_consumer.read.shared import ServerClock, SharedReader, SharedReaders
from penstock_consumer.stages.batch import ArrayPool, Lease
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped
from tests.clusters import until
from tests.contracts.feed import loader_of, open_stream, produce
from tests.contracts.ordered import plan, rank_of
from tests.placed import Placement

COUNT = 40


def test_the_servers_clock_is_compared_at_first_and_then_now_and_then(
    any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age of a batch is told by it. A comparison is a round trip, and clocks drift by a second in hours."""
    asked, now_s = list[float](), [5000.0]

    def told(client: Client, key: str) -> int:
        asked.append(now_s[0])
        return server_ms(client, key)

    monkeypatch.setattr(shared, "server_ms", told)
    clock = ServerClock(any_client, "key", lambda: now_s[0])
    for now_s[0] in (5000.0, 5009.9, 5010.0, 5019.9, 5021.0):
        clock.compare()
    assert asked == [5000.0, 5010.0, 5021.0]


def test_the_time_of_an_entry_is_told_by_this_processs_clock(any_client: Client) -> None:
    """The server may be another machine, whose clock is wrong by a day."""
    clock = ServerClock(any_client, "key", lambda: time.time() - 86_400)
    clock.compare()
    now_ms = server_ms(any_client, "key")
    older, newest = (ReceivedEntry(b"%d-7" % (now_ms + ms), 0, None) for ms in (0, 60_000))
    created_s = clock.created_s([older, newest])
    assert created_s is not None
    assert abs(created_s - (time.time() + 60 - 86_400)) < 30
    assert clock.created_s([]) is None


@pytest.fixture
def said() -> list[str]:
    """Return the notices of the claim."""
    return []


@pytest.fixture
def claim(any_url: str, any_client: Client, said: list[str]) -> Iterator[LeaseClaim]:
    """Yield the claim of a member that has joined, and that no thread keeps."""
    produce(any_url, "t", COUNT, block_samples=4)
    claim = LeaseClaim(any_client, Membership(open_stream(any_client, "t"), "g", "m", "life"), 10.0, said.append)
    claim.join("resume")
    yield claim
    claim.close()


@pytest.fixture
def queue() -> PrefetchQueue:
    """Return the queue between the reader and a loop."""
    return PrefetchQueue(1 << 20)


@pytest.fixture
def reader(claim: LeaseClaim, queue: PrefetchQueue) -> SharedReader:
    """Return the only reader of the first epoch, which has asked for nothing."""
    (reader,) = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)._readers
    return reader


def test_members_divide_what_they_compare_with_the_index(
    claim: LeaseClaim, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would read a page of records for each of its entries, and the pages would be the others'."""
    begun = list[int]()
    monkeypatch.setattr(CommitCheck, "begin", lambda _, members: begun.append(members))
    claim.heartbeat.expect_members(3)
    SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)
    assert begun == [3]


def test_a_reader_that_connected_again_takes_back_what_never_arrived(
    reader: SharedReader, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts it as delivered. It may also be another server, which lacks acknowledgements."""
    looks = list[tuple[Any, ...]]()
    monkeypatch.setattr(DeliveryCheck, "look", lambda _, *given: looks.append(given))
    entries = claim.stream.partitions[0].entries(0)
    given: Any = any_client.xreadgroup("g", "m", {entries: ">"}, count=1)
    reader._recover()
    assert looks == [(reader._partitions, reader._await_acknowledged)]
    assert [one.entry_id for one in claim.heartbeat.claims] == [given[0][1][0][0]]


def test_partitions_that_move_to_another_server_are_read_by_another_reader(
    any_url: str, any_client: Client, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent server holds up all that is read by the same thread."""
    plan(any_url, [COUNT] * 3, partitions=3)
    stream, started = open_stream(any_client, "t"), list[SharedReader]()
    placement = Placement(any_client, stream, monkeypatch)
    monkeypatch.setattr(SharedReaders, "_start", lambda _, reader: started.append(reader))

    def numbers_of(reader: SharedReader) -> list[int]:
        return [partition.number for partition in reader._partitions]

    with closing(LeaseClaim(any_client, Membership(stream, "g", "m", "life"), 10.0, print)) as claim:
        claim.join("resume")
        (reader,) = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)._readers
        before, whole_bytes = reader._connection, reader._planner.request_bytes
        before.open()
        assert not reader._has_moved
        placement.move("b", 0, 1, 2)
        assert reader._has_moved
        reader._split()
        assert (reader._has_moved, started, placement.looks) == (False, [], 0), "they are together"
        assert reader._connection is before
        placement.move("c", 1)
        reader._split()
        assert (numbers_of(reader), [numbers_of(one) for one in started]) == ([0, 2], [[1]])
        assert [reader._is_late, started[0]._is_late] == [False, True]
        assert [reader.has_ended, started[0].has_ended] == [False, False]
        assert not reader._planner._is_referred
        assert (reader._has_moved, started[0]._has_moved, placement.looks) == (False, False, 1)
        assert (before._channel, reader._connection is before) == (None, False)
        parts = [one._planner.request_bytes / whole_bytes for one in (reader, started[0])]
        assert parts == pytest.approx([2 / 3, 1 / 3], rel=0.01)


class TestAfterAnOutage:
    """A server that came back may have lost acknowledgements, and members send them again before anything is read."""

    @pytest.fixture(autouse=True)
    def times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the wait for other members so long that a test which waits for it fails."""
        monkeypatch.setattr(shared, "OTHERS_S", 3600.0)
        monkeypatch.setattr(shared, "ACKNOWLEDGED_S", 10.0)

    def waited_s(self, reader: SharedReader) -> float:
        """Return how long the reader waits."""
        began_s = time.monotonic()
        reader._await_acknowledged()
        return time.monotonic() - began_s

    def test_a_lone_member_goes_on_once_its_own_are_there(self, reader: SharedReader) -> None:
        """Nobody else has any."""
        assert self.waited_s(reader) < 5

    def test_other_members_have_a_time_for_theirs(
        self, reader: SharedReader, claim: LeaseClaim, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise what they acknowledged would be trained on once more."""
        claim.heartbeat.expect_members(2)
        monkeypatch.setattr(shared, "OTHERS_S", 0.3)
        assert 0.3 <= self.waited_s(reader) < 5

    def test_a_server_that_takes_none_is_not_waited_for_without_end(
        self, reader: SharedReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The loop may be in a long step, and the acknowledgement comes behind it."""
        monkeypatch.setattr(shared, "ACKNOWLEDGED_S", 0.3)
        monkeypatch.setattr(Outboxes, "is_empty_for", lambda *_: False)
        assert 0.3 <= self.waited_s(reader) < 5

    def test_a_loop_that_ends_is_not_held_up(
        self, reader: SharedReader, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A program that is interrupted ends at once."""
        monkeypatch.setattr(Outboxes, "is_empty_for", lambda *_: False)
        queue.stop()
        with pytest.raises(QueueStopped):
            self.waited_s(reader)


def test_a_loop_that_ends_while_others_hold_the_rest_is_not_held_up(any_url: str, any_client: Client) -> None:
    """Their leases may last for minutes. The thread would read on behind the back of a program that went on."""

    def readers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("penstock-reader")}

    produce(any_url, "t", COUNT, block_samples=4)
    stream, before = open_stream(any_client, "t"), readers()
    join_group(any_client, Membership(stream, "g", "", ""))
    any_client.xreadgroup("g", "dead", {stream.partitions[0].entries(0): ">"}, count=1)
    with loader_of(any_url, batch_size=4, lease_s=600.0, timeout_s=1) as loader:
        with pytest.raises(WaitTimeout, match=r"what dead was given .* did not acknowledge"):
            for _ in loader:
                pass
        assert readers() - before
    until(lambda: not readers() - before)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_reader_whose_queue_is_full_rests(any_url: str, monkeypatch: pytest.MonkeyPatch, is_ordered: bool) -> None:
    """The training has the processor. A reader that looks again and again would take a core from it."""
    plan(any_url, [400], block_samples=4)
    turns = list[int]()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            turns.append(1)
            return real(*given, **named)

        return call

    loader_for: Any = rank_of if is_ordered else loader_of
    with loader_for(any_url, prefetch_bytes=200) as loader:
        batches = iter(loader)
        next(batches)
        time.sleep(0.5)
        monkeypatch.setattr(RowPlan, "extend", counted(RowPlan.extend))
        monkeypatch.setattr(FetchPlanner, "share", counted(FetchPlanner.share))
        time.sleep(0.5)
        assert len(turns) < 25


def test_a_claim_that_is_closed_leaves_no_connection(claim: LeaseClaim, any_client: Client) -> None:
    """A program that keeps its loader would keep a connection for each of its partitions."""
    header: Any = SimpleNamespace(epoch=0, shard=0, end=4)

    def connections() -> set[str]:
        return {one["id"] for one in any_client.client_list()}

    before = connections()
    claim.commit_checks[0].ask(header)
    made = connections() - before
    assert made
    claim.close()
    until(lambda: not made & connections())


class TestKeeping:
    """A member is kept from its join on."""

    @pytest.fixture
    def rank(self, claim: LeaseClaim, any_client: Client) -> Iterator[RankClaim]:
        """Yield the claim of a rank of another group."""
        who = Membership(claim.stream, "ranks", rank_member(0), "life", RankOrder(0, 1, 4))
        rank = RankClaim(any_client, who, 10.0, print)
        rank.join("resume")
        yield rank
        rank.close()

    @pytest.mark.parametrize("is_ordered", [False, True])
    def test_its_heartbeat_tells_others_that_it_lives(
        self, claim: LeaseClaim, rank: RankClaim, any_client: Client, is_ordered: bool
    ) -> None:
        """What it holds would be handed out to others in the middle of a long step."""
        kept: LeaseClaim | RankClaim = rank if is_ordered else claim
        name = kept.who.group, kept.who.member

        def seen() -> int:
            return load_roster(any_client, claim.stream.partitions[0]).members[name]

        joined_ms = seen()
        kept.keep()
        try:
            until(lambda: seen() > joined_ms)
        finally:
            kept.heartbeat.stop()

    @pytest.mark.parametrize("is_ordered", [False, True])
    def test_a_server_that_is_replaced_after_the_join_is_noticed(
        self, claim: LeaseClaim, rank: RankClaim, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
    ) -> None:
        """What it lost is named by comparing with the run that was there at the join."""
        kept: LeaseClaim | RankClaim = rank if is_ordered else claim
        learned = list[str]()
        monkeypatch.setattr(LossDetector, "check", lambda _: learned.append("losses"))
        monkeypatch.setattr(ServerRuns, "learn", lambda _: learned.append("runs"))
        monkeypatch.setattr(claims, "join_group", lambda *_, **__: learned.append("join"))
        monkeypatch.setattr(type(kept.heartbeat), "start", lambda _: learned.append("heartbeat"))
        kept.join("resume")
        kept.keep()
        assert learned == ["runs", "join", "losses", "heartbeat"]

    def test_what_ended_processes_left_is_taken_over_at_once(
        self, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An earlier process had its name, and another one died on this host. A job that is restarted has both."""
        monkeypatch.setattr(type(claim.heartbeat), "start", lambda _: None)
        (partition,) = claim.stream.partitions
        ended = f"{new_incarnation().rpartition('.')[0]}.1"  # its pid is another process's now
        join_group(any_client, Membership(claim.stream, "g", "dead", ended))
        any_client.hset(partition.roster, "m:g:dead", json.dumps({"inc": ended, "seen": 0}))
        given: Any = any_client.xreadgroup("g", "m", {partition.entries(0): ">"}, count=1)
        claim.keep()
        assert [one.entry_id for one in claim.heartbeat.claims] == [given[0][1][0][0]]
        assert ("g", "dead") not in load_roster(any_client, partition).members


class TestClaimedEntries:
    """What dead members left is fetched by its id, while the reader has a place for it."""

    @pytest.fixture
    def ids(self, any_url: str, claim: LeaseClaim, any_client: Client) -> dict[int, list[bytes]]:
        """Let a member that died have all entries of three epochs. Return epoch -> ids."""
        produce(any_url, "t", COUNT, epochs=2, block_samples=4)
        found = {}
        for epoch in range(3):
            key = claim.stream.partitions[0].entries(epoch)
            answer: Any = any_client.xreadgroup("g", "dead", {key: ">"}, count=100)
            found[epoch] = [entry_id for entry_id, _ in answer[0][1]]
        return found

    @pytest.fixture
    def second(
        self, any_url: str, ids: dict[int, list[bytes]], claim: LeaseClaim, queue: PrefetchQueue
    ) -> SharedReader:
        """Return a reader of the second epoch."""
        (reader,) = SharedReaders(claim, 1, queue, ArrayPool(4), batch_size=4, views=False)._readers
        return reader

    def taken(self, queue: PrefetchQueue) -> list[tuple[int, list[int]]]:
        """Return epoch and numbers of the batches in a queue."""
        found = []
        while queue.holds_batches:
            batch = queue.get(0)
            assert batch is not None
            found.append((batch.epoch, batch["y"].tolist()))
        return found

    def test_those_of_earlier_epochs_come_first_and_later_ones_wait_for_their_epoch(
        self, second: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, ids: dict[int, list[bytes]]
    ) -> None:
        """An earlier epoch is closed with them, and a loop over this one must not get samples of the next."""
        claims = claim.heartbeat.claims
        claims += [ClaimedEntry(0, epoch, ids[epoch][at]) for epoch, at in ((2, 0), (1, 1), (0, 2), (1, 0))]
        assert second._has_claims()
        second._fetch_claims()
        assert self.taken(queue) == [(0, [8, 9, 10, 11]), (1, [4, 5, 6, 7]), (1, [0, 1, 2, 3])]
        assert [one.epoch for one in claims] == [2]
        assert not second._has_claims()
        assert claim.unclosed == {0}
        assert claim.leases.ids(0) == {0: [ids[0][2]], 1: [ids[1][1], ids[1][0]]}

    def test_one_on_which_training_may_die_comes_alone_and_the_worst_last(
        self,
        second: SharedReader,
        claim: LeaseClaim,
        queue: PrefetchQueue,
        ids: dict[int, list[bytes]],
        said: list[str],
        any_client: Client,
    ) -> None:
        """Whatever is behind it would be lost with the process, and the log names it before."""
        claims, key = claim.heartbeat.claims, claim.stream.partitions[0].entries(1)
        any_client.xclaim(key, "g", "m", 0, ids[1][:4])

        def deliveries() -> dict[bytes, int]:
            held = any_client.xpending_range(key, "g", "-", "+", 10, "m")
            return {one["message_id"]: one["times_delivered"] for one in held}

        before = deliveries()
        claims += [ClaimedEntry(0, 1, ids[1][at], times) for at, times in ((0, 9), (1, 6), (2, 4), (3, 7))]
        assert second._has_claims(suspect=True)
        second._fetch_claims()
        assert self.taken(queue) == [(1, [8, 9, 10, 11])]
        assert not second._has_claims()
        for left, numbers in ((2, [4, 5, 6, 7]), (1, [12, 13, 14, 15]), (0, [0, 1, 2, 3])):
            second._fetch_claims(suspect=True)
            assert self.taken(queue) == [(1, numbers)]
            assert len(claims) == left
            assert second._has_claims(suspect=True) is (left > 0)
        assert [line.split(" was given out ")[1][:7] for line in said] == ["6 times", "7 times", "9 times"]
        assert "(shard 0 offsets 4-7)" in said[0]
        counted = {at: deliveries()[ids[1][at]] for at in range(4)}
        assert counted == {0: 10, 1: 7, 2: before[ids[1][2]], 3: 8}, "a death is counted before it can happen"

    def test_what_the_group_acknowledged_meanwhile_is_left_out(
        self, second: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, ids: dict[int, list[bytes]]
    ) -> None:
        """The member that died had trained on a part."""
        manifest = load_manifest(claim.client, claim.stream, 1)
        acknowledge(claim.client, claim.stream.partitions[0], manifest, "g", [], {0: [(1, 3)]})
        claim.heartbeat.claims += [ClaimedEntry(0, 1, ids[1][0]), ClaimedEntry(0, 1, ids[1][1])]
        second._fetch_claims()
        assert self.taken(queue) == [(1, [0, 3, 4, 5]), (1, [6, 7])]

    def test_those_that_are_gone_are_held_no_more(
        self, second: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, ids: dict[int, list[bytes]]
    ) -> None:
        """Otherwise the member would renew them for ever, and its group would wait for it."""
        for epoch in (0, 1):
            claim.leases.add(Lease(0, epoch, -1, ids[epoch][0], 1))
            claim.heartbeat.claims.append(ClaimedEntry(0, epoch, ids[epoch][0]))
        abandon_epoch(claim.client, claim.stream, 0)
        assert release_epoch(claim.client, claim.stream, 0)
        claim.client.xdel(claim.stream.partitions[0].entries(1), ids[1][0])
        second._fetch_claims()
        assert self.taken(queue) == []
        assert 0 not in claim.leases.ids(0)
        assert not claim.heartbeat.claims

    def test_what_could_not_be_fetched_stays_claimed(
        self,
        second: SharedReader,
        claim: LeaseClaim,
        queue: PrefetchQueue,
        ids: dict[int, list[bytes]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The next loop of this program gets it."""
        claim.heartbeat.claims += [ClaimedEntry(0, epoch, ids[epoch][0]) for epoch in (2, 1, 0)]
        queue.stop()
        with pytest.raises(QueueStopped):
            second._fetch_claims()
        assert sorted(one.epoch for one in claim.heartbeat.claims) == [0, 1, 2]


def test_the_clocks_are_compared_again_in_a_long_epoch(reader: SharedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless feed is one epoch of months."""
    compared = list[ServerClock]()
    monkeypatch.setattr(ServerClock, "compare", lambda clock: compared.append(clock))
    reader._look_again()
    assert compared == [reader._server_clock]
    reader.queue.end()
    reader.run()
    assert compared == [reader._server_clock] * 2, "and at the beginning"


def test_as_many_records_are_read_ahead_as_entries_are_asked_for(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry is compared with its record, which would be a round trip for each of them."""
    produce(any_url, "t", COUNT, block_samples=4)
    expected, expect = list[int](), CommitCheck.expect

    def noted(self: CommitCheck, entries: int) -> None:
        expected.append(entries)
        expect(self, entries)

    monkeypatch.setattr(CommitCheck, "expect", noted)
    with loader_of(any_url) as loader:
        assert sum(batch.size for batch in loader) == COUNT
    assert max(expected) > 1


def test_only_a_good_entry_shows_that_bad_ones_are_bad_in_themselves(
    reader: SharedReader, claim: LeaseClaim, any_client: Client
) -> None:
    """A reader of another version can read nothing. It would make dead letters of good entries."""
    partition, manifest = claim.stream.partitions[0], load_manifest(any_client, claim.stream, 0)
    given: Any = any_client.xreadgroup("g", "m", {partition.entries(0): ">"}, count=2)
    bad, good = (entry_id for entry_id, _ in given[0][1])
    found = []
    for one in (
        ReceivedEntry(bad, 0, None, BadEntry("this reader has a bug")),
        ReceivedEntry(good, 0, Lease(0, 0, 0, good, unacknowledged=4)),
    ):
        reader._book([one], manifest, partition)
        found.append(any_client.hkeys(partition.dead(0, "g")))
    assert found == [[], [bad]]


class TestTheEnd:
    """An epoch is over here once nobody can bring more of it."""

    def entries(self, claim: LeaseClaim) -> str:
        """Return the key of the epoch's entries."""
        return claim.stream.partitions[0].entries(0)

    def test_what_a_dead_member_holds_is_waited_for(
        self, reader: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, any_client: Client
    ) -> None:
        """It is handed out here, in this pass of the epoch, once its lease has lapsed."""
        any_client.xreadgroup("g", "dead", {self.entries(claim): ">"}, count=1)
        ended = list[bool]()
        thread = threading.Thread(target=lambda: ended.append(reader._is_over()))
        thread.start()
        until(lambda: reader._silent == {"dead"})
        assert "what dead was given of epoch 0 of 't' and did not acknowledge" in reader.why_waiting(1)
        assert ended == []
        claim.heartbeat.claims.append(ClaimedEntry(0, 0, b"1-1"))
        thread.join(20)
        assert ended == [False], "there is something to fetch"

    def test_what_a_live_member_holds_is_left_to_it(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client
    ) -> None:
        """It acknowledges it, or returns it for the next pass."""
        other = Membership(claim.stream, "g", "lives", "life")
        join_group(any_client, other)
        any_client.xreadgroup("g", "lives", {self.entries(claim): ">"}, count=1)
        ended = list[bool]()
        thread = threading.Thread(target=lambda: ended.append(reader._is_over()))
        thread.start()
        until(lambda: reader._silent == {"lives"})
        while thread.is_alive():
            beat(any_client, other, claim.stream.partitions[0], {})
            thread.join(0.05)
        assert ended == [True]
        assert reader._silent == set()

    def test_what_was_returned_is_taken_at_once(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client
    ) -> None:
        """Its lease counts no more, and no other member may be there."""
        any_client.xreadgroup("g", RELEASED, {self.entries(claim): ">"}, count=1)
        claim.heartbeat.read_epoch(0)
        assert not reader._is_over()
        assert [(one.partition, one.epoch) for one in claim.heartbeat.claims] == [(0, 0)]

    def test_an_epoch_that_was_given_up_is_over_whoever_holds_it(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client
    ) -> None:
        """Its acknowledgements are refused, so nothing of it would ever be acknowledged."""
        any_client.xreadgroup("g", "dead", {self.entries(claim): ">"}, count=1)
        abandon_epoch(any_client, claim.stream, 0)
        reader._look_again()
        claim.heartbeat.claims.append(ClaimedEntry(0, 0, b"1-1"))
        assert not reader._is_over()
        claim.heartbeat.claims.clear()
        assert reader._is_over()

    def test_a_state_that_no_producer_writes_ends_it_by_an_error(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No acknowledgement would be taken, and its entries would come again and again."""
        monkeypatch.setattr(shared, "STATE_LOOK_S", 0.01)
        any_client.set(claim.stream.partitions[0].state(0), "rubbish")
        with pytest.raises(DamagedKey, match="state"):
            reader._is_over()

    @pytest.mark.parametrize("is_ordered", [False, True])
    def test_a_reader_that_was_stopped_says_that_it_has_ended(
        self, claim: LeaseClaim, queue: PrefetchQueue, any_client: Client, is_ordered: bool
    ) -> None:
        """A loop in another thread waits for the next batch."""
        queue.stop()
        if is_ordered:
            who = Membership(claim.stream, "ranks", rank_member(0), "life", RankOrder(0, 1, 4))
            with closing(RankClaim(any_client, who, 10.0, print)) as rank:
                rank.join("resume")
                OrderedReader(rank, 0, queue, ArrayPool(4), remainder="pad", start=0, views=False).run()
        else:
            SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False).run()
        assert queue.is_ended
        assert queue.get(0) is None
