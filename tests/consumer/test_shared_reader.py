"""The parts of a shared reader, each alone with a real server: its clock, its waits, and the claim of its member."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_common.errors import (
    BadEntry,
    DamagedKey,
    EpochIncomplete,
    EpochNotFound,
    MemberReplaced,
    PenstockError,
    ServerUnavailable,
    WaitTimeout,
)
from penstock_common.explain.sentences import CLOSE_AFTER_S
from penstock_common.server.channel import Channel
from penstock_common.stream.commands import Client, server_ms
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.ledger import acknowledge
from penstock_common.stream.groups.losses import LossDetector, ServerRuns
from penstock_common.stream.groups.outbox import Outboxes
from penstock_common.stream.groups.presence import new_incarnation
from penstock_common.stream.groups.roster import (
    Membership,
    RankOrder,
    beat,
    close_for_group,
    join_group,
    load_roster,
    note_wait,
    rank_member,
)
from penstock_common.stream.keys import RELEASED
from penstock_common.stream.manifest import Manifest, abandon_epoch, load_manifest
from penstock_common.stream.removal.deletion import release_epoch
from penstock_consumer.read import claims, shared
from penstock_consumer.read.claims import LeaseClaim, RankClaim
from penstock_consumer.read.dead_letters import DeadLetters
from penstock_consumer.read.fetch_plan import REQUEST_BYTES, FetchPause, FetchPlanner, FetchRequest
from penstock_consumer.read.heartbeat import ClaimedEntry
from penstock_consumer.read.ordered import OrderedReader, RowPlan
from penstock_consumer.read.receive import CommitCheck, DeliveryCheck, ReaderConnection, ReceivedEntry, read_by_id
from penstock_consumer.read.shared import ServerClock, SharedReader, SharedReaders
from penstock_consumer.stages.batch import ArrayPool, Lease
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped
from tests.clusters import until
from tests.contracts.feed import loader_of, open_stream, produce, sample
from tests.contracts.ordered import plan, planned_writer, rank_of
from tests.placed import Placement

COUNT = 40


def test_the_servers_clock_is_compared_at_first_and_then_now_and_then(
    any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock gives the age of a batch. A comparison is a round trip, and clocks drift by a second in hours."""
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


def numbers_in(queue: PrefetchQueue) -> list[int]:
    """Return the samples that wait in a queue."""
    found = list[int]()
    while queue.holds_batches:
        batch = queue.get(0)
        assert batch is not None
        found += batch["y"].tolist()
    return found


def rank_claim(claim: LeaseClaim) -> RankClaim:
    """Return the claim of the only rank of another group, which has not joined."""
    who = Membership(claim.stream, "ranks", rank_member(0), "life", RankOrder(0, 1, 4))
    return RankClaim(claim.client, who, 10.0, print)


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


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reader_that_took_partitions_over_begins_with_what_never_arrived(
    claim: LeaseClaim, queue: PrefetchQueue, any_client: Client, is_late: bool
) -> None:
    """The reader before it had asked for it. Any other reader has asked for nothing, and need not look for it first."""
    any_client.xreadgroup("g", "m", {claim.stream.partitions[0].entries(0): ">"}, count=1)
    reader = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)._add([0], is_late=is_late)
    reader.run()
    rest = list(range(4, COUNT))
    assert numbers_in(queue) == [*range(4), *rest] if is_late else [*rest, *range(4)]
    assert reader.has_ended
    assert reader._connection._channel is None, "a connection is left"


def test_a_reader_that_is_stopped_knows_what_the_server_gave_to_it(
    claim: LeaseClaim, queue: PrefetchQueue, any_client: Client
) -> None:
    """It returns that at once. What it does not know of waits for the end of a lease, and with it all others."""
    (reader,) = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=COUNT, views=False)._readers
    reader._server_clock.compare()
    reader._ask()
    queue.stop()
    reader.run()
    held = any_client.xpending_range(claim.stream.partitions[0].entries(0), "g", "-", "+", 100, "m")
    assert len(held) > 1
    assert claim.leases.ids(0) == {0: [one["message_id"] for one in held]}
    assert queue.is_ended


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_reader_reads_nothing_under_a_name_that_another_process_took(
    claim: LeaseClaim, queue: PrefetchQueue, any_client: Client, is_ordered: bool
) -> None:
    """The entries would be the other's, who does not know of them."""
    with ExitStack() as stack:
        if is_ordered:
            rank = stack.enter_context(closing(rank_claim(claim)))
            rank.join("resume")
            rank.heartbeat._each[0].error = MemberReplaced("taken")
            reader: Any = OrderedReader(rank, 0, queue, ArrayPool(4), remainder="pad", start=0, views=False)
        else:
            claim.heartbeat._each[0].error = MemberReplaced("taken")
            reader = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)
        reader.run()
    with pytest.raises(MemberReplaced, match="taken"):
        queue.get(0)
    assert any_client.xpending(claim.stream.partitions[0].entries(0), "g")["pending"] == 0


def test_a_reader_says_what_it_waits_for(reader: SharedReader, claim: LeaseClaim, any_client: Client) -> None:
    """The line sends its reader to the producer, to the quota, or to this process."""
    key, told = claim.stream.keys.manifest(0), list[str]()
    told.append(reader.why_waiting(3))
    reader.queue.reader_times.to("server")
    told.append(reader.why_waiting(3))
    any_client.hset(key, "state", "open")
    told.append(reader.why_waiting(3))
    told.append(reader.why_waiting(CLOSE_AFTER_S))
    any_client.hdel(key, "sizes", "shards")
    told.append(reader.why_waiting(3))
    note_wait(
        any_client, claim.stream.partitions[0], 0, 0, waited_s=9, need_bytes=1, held_bytes=1, why="budget", is_next=True
    )  # fmt: skip
    told.append(reader.why_waiting(3))
    any_client.hdel(claim.stream.partitions[0].roster, "w:0:0")
    any_client.delete(key)
    told.append(reader.why_waiting(3))
    full = "its writer waits for space (960 bytes of the budget, 1024 MiB,"
    rest, more = ("the rest of epoch 0 of 't'", "more samples of epoch 0 of 't'")
    done, none, ask = (
        " (1 of 1 shards are done)",
        "; none came for 3 s",
        ". Is a producer running (`penstock inspect t`)?",
    )
    starting, none_will = " Its workers may still be starting", " If none will: `penstock epochs close t 0`"
    assert told == [
        f"{rest}{done}{none}: this process is at work",
        f"{rest}{done}{none}: this process waits for the server",
        f"{more}{done}{none}{ask}{starting}",  # inside `penstock run` workers still import after 3 s
        f"{more}{done}; none came for 20 s{ask}{none_will}",
        f"{more}{none}{ask}{starting}",
        f"{more}{none}: {full} is held; group 'g' has yet to read 960 bytes)",
        f"{rest}{done}{none}: this process waits for the server",  # what was known of it before it was gone
    ]


def test_a_reader_does_not_advise_to_close_an_epoch_that_grows(any_url: str) -> None:
    """Other members took the samples of a live feed. Its producer would end with an error."""
    with planned_writer(any_url) as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
        epoch.flush()
        with loader_of(any_url, batch_size=1) as one, loader_of(any_url, batch_size=1, member="other") as other:
            assert next(iter(one)).size == 1
            run = other._joined().begin(0)
            told = run.why_waiting(30)
            assert "; none came for 30 s: members of group 'g' were given what was committed in this time" in told
            time.sleep(0.1)
            assert "Is a producer running" in run.why_waiting(0.05)


def test_a_reader_names_the_writers_that_have_not_ended_their_part_of_a_feed(any_url: str) -> None:
    """An actor that was killed holds its learners up without end, and they asked whether a producer was running."""
    with planned_writer(any_url) as killed, planned_writer(any_url) as other:
        killed.write(sample(0))
        killed.flush()
        other.write(sample(1))
        other.close()
        with loader_of(any_url, batch_size=2) as loader:
            assert next(iter(loader)).size == 2
            told = loader._joined().begin(0).why_waiting(33)
    assert re.search(r"the writers of shards 0 \(last written \d s ago\) have not, and nothing came for 33 s", told)
    assert told.endswith("` ends it as committed, and a writer that still runs ends with ShardMismatch")


class TestAnswers:
    """Tests of what a reader notes of each answer."""

    def test_a_server_may_be_another_one_with_each_answer(
        self, reader: SharedReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may lack acknowledgements, and gives the same entries out again without an error."""
        looks, answers = list[tuple[Any, ...]](), list[int]()
        monkeypatch.setattr(DeliveryCheck, "look", lambda _, *given: looks.append(given))
        monkeypatch.setattr(CommitCheck, "expect", lambda _, entries: answers.append(entries))
        reader.run()
        assert looks == [(reader._partitions, reader._await_acknowledged)] * len(answers)
        assert len(answers) > 1

    def test_answers_of_before_an_outage_say_nothing_of_now(
        self, reader: SharedReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A partition that had nothing then may have entries now. The members that share them may be others, too."""
        events, take_answer = list[str](), SharedReader._take_answer

        def broken_once(reader: SharedReader) -> int:
            if "outage" not in events:
                events.append("outage")
                raise ServerUnavailable("away")
            return take_answer(reader)

        monkeypatch.setattr(SharedReader, "_take_answer", broken_once)
        monkeypatch.setattr(FetchPlanner, "restart", lambda _: events.append("restart"))
        monkeypatch.setattr(FetchPlanner, "share", lambda _, members: events.append(f"share of {members}"))
        before = reader._connection.open()
        reader._read()
        assert events[:5] == ["restart", "share of 1", "outage", "restart", "share of 1"]
        assert reader._connection.open() is not before

    @pytest.mark.parametrize(("state", "is_ended"), [("open", False), ("produced", True)])
    def test_answers_of_before_the_end_was_known_do_not_end_an_epoch(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, state: str, is_ended: bool
    ) -> None:
        """Entries may have come between an answer and the end."""
        any_client.hset(claim.stream.keys.manifest(0), "state", state)
        reader._planner.answered(FetchRequest(0, 1, None), 0, 0.0, 0.0)
        assert reader._planner.ends_sweep
        reader._look_again()
        assert reader._planner.ends_sweep is not is_ended

    def test_claimed_entries_make_a_reader_ask_all_partitions_again(
        self, reader: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, any_client: Client
    ) -> None:
        """They may be of a server that came back older. It has new entries again where it said that there are none."""
        given: Any = any_client.xreadgroup("g", "m", {claim.stream.partitions[0].entries(0): ">"}, count=1)
        claim.heartbeat.claims.append(ClaimedEntry(0, 0, given[0][1][0][0]))
        reader._planner.answered(FetchRequest(0, 1, None), 0, 0.0, 0.0)
        assert reader._planner.ends_sweep
        reader._fetch_or_ask()
        assert not reader._planner.ends_sweep
        assert numbers_in(queue) == list(range(4))

    def test_space_is_needed_for_what_is_asked_for_already(
        self, reader: SharedReader, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While an answer is under way, the reader does not rest: it takes that first."""
        asked = list[tuple[int, float]]()

        def wait_for_space(pending_bytes: int, timeout_s: float) -> bool:
            asked.append((pending_bytes, timeout_s))
            return True

        monkeypatch.setattr(queue, "wait_for_space", wait_for_space)
        reader._fetch_or_ask()
        reader._fetch_or_ask()
        assert asked == [(0, 0.2), (2 * reader._planner.request_bytes, 0)]

    def test_a_lone_reader_of_entries_asks_for_as_little_as_others(self, claim: LeaseClaim) -> None:
        """The server copies all of an answer. Payloads in segments are not copied, and only they are asked for more."""
        queue = PrefetchQueue(1 << 30)
        (reader,) = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)._readers
        reader._planner.share(1)
        assert reader._planner.request_bytes == REQUEST_BYTES

    def test_the_ledger_is_not_asked_of_new_entries(
        self, reader: SharedReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A question would cost a round trip for each entry. No member has received new entries before."""
        asked = list[Any]()
        monkeypatch.setattr(shared, "done_bits", lambda *given: asked.append(given))
        reader.run()
        assert asked == []

    def test_a_request_that_cannot_be_sent_is_not_waited_for(
        self, reader: SharedReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No answer comes, and the next answer would be taken for its own."""
        opened, real = list[int](), ReaderConnection.open

        def broken_once(connection: ReaderConnection) -> Channel:
            opened.append(1)
            if len(opened) == 1:
                raise ServerUnavailable("away")
            return real(connection)

        monkeypatch.setattr(ReaderConnection, "open", broken_once)
        reader._ask()
        assert not reader._asked

    @pytest.mark.parametrize("waited_s", [0.0, 20.0])
    def test_an_answer_of_long_ago_is_not_handed_out_before_it_is_renewed(
        self, reader: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, waited_s: float
    ) -> None:
        """A process that stood still finds it in its socket. Another member may have taken its entries over."""
        reader._ask()
        reader._asked = deque((request, asked_s - waited_s) for request, asked_s in reader._asked)
        reader._take_answer()
        batch = queue.get(0)
        assert batch is not None
        assert claim.heartbeat.is_fresh_for(batch) is not bool(waited_s)

    @pytest.mark.parametrize("what", ["", "asked", "ended", "alone", "partitions"])
    def test_a_reader_pauses_only_where_entries_may_gather(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """Otherwise the pause is a wait."""
        if what != "ended":
            any_client.hset(claim.stream.keys.manifest(0), "state", "open")
        reader._look_again()
        if what == "asked":
            reader._asked.append((FetchRequest(0, 1, None), 0.0))
        if what == "partitions":
            monkeypatch.setattr(type(claim.stream), "partitions", claim.stream.partitions * 2)
        monkeypatch.setattr(FetchPlanner, "pause_s", lambda *_: 0.0 if what == "alone" else 60.0)
        assert reader._pauses() is not bool(what)
        assert bool(reader._pause.commands()) is not bool(what)

    def test_a_reader_waits_for_producers_where_it_was_told_that_nothing_is_there(
        self, reader: SharedReader, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else for the server, and in a pause for producers."""
        told = list[tuple[str, bool]]()
        monkeypatch.setattr(queue.reader_times, "to", lambda doing: told.append((doing, reader._planner.is_waiting)))
        reader._server_clock.compare()
        reader._pause.begin(0.5)  # longer than any delay before the request
        reader._ask()
        reader._take_answer()
        assert told == [("producers", False), ("server", False)]
        told.clear()
        reader._planner.answered(FetchRequest(0, 1, None), 0, 0.0, 0.0)
        reader._take_answer()
        assert told == [("producers", True)]

    @pytest.mark.parametrize("what", ["damaged", "gone"])
    def test_an_answer_that_is_an_error_ends_the_epoch_by_it(
        self, reader: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, any_client: Client, what: str
    ) -> None:
        """The error names the key, or the epoch with all that may have become of it."""
        key = claim.stream.partitions[0].entries(0)
        if what == "gone":
            any_client.xgroup_destroy(key, "g")
        else:
            any_client.set(key, "rubbish")
        reader.run()
        expected: tuple[type[PenstockError], str] = (
            (EpochNotFound, "epoch 0 of 't' was released, or its group dropped") if what == "gone" else
            (DamagedKey, "entries|string")
        )  # fmt: skip
        with pytest.raises(expected[0], match=expected[1]):
            queue.get(0)

    def test_a_pause_is_told_of_the_newest_entry(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hint of before it would end the next pause at once."""
        newest = list[bytes]()
        monkeypatch.setattr(FetchPause, "received", lambda _, entry_id: newest.append(entry_id))
        reader.run()
        ids = [entry_id for entry_id, _ in any_client.xrange(claim.stream.partitions[0].entries(0))]
        assert newest == sorted(newest)
        assert newest[-1] == ids[-1]

    def test_the_time_of_each_answer_is_that_of_its_newest_entry(
        self, reader: SharedReader, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cause of a wait is found by it: until an entry was written, its producer was waited for."""
        told, before_s = list[tuple[float, float | None]](), time.perf_counter() - 60
        monkeypatch.setattr(queue.reader_times, "received", lambda *given: told.append(given))
        waited_s: Any = Channel.waited_s
        monkeypatch.setattr(Channel, "waited_s", property(lambda channel: 1000 + waited_s.fget(channel)))
        reader.run()
        *full, (_, created_s) = told
        assert created_s is None, "the last answer brought nothing"
        assert full
        assert all(one is not None and before_s < one for _, one in full)
        assert all(0 <= waited_s < 60 for waited_s, _ in told)

    def test_a_loss_that_is_over_leaves_the_next_one_its_time(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An endless feed is one epoch, and its server may be replaced more than once."""
        (partition,) = claim.stream.partitions
        monkeypatch.setattr(shared, "LOST_S", 0.0)
        named = load_manifest(any_client, claim.stream, 0).id
        any_client.hdel(partition.roster, "e:0")
        assert reader._is_lost_in(partition)
        any_client.hset(partition.roster, "e:0", named)
        reader.run()
        any_client.hdel(partition.roster, "e:0")
        assert reader._is_lost_in(partition)

    def test_batches_are_handed_on_while_the_epoch_is_written(
        self, any_url: str, any_client: Client, queue: PrefetchQueue
    ) -> None:
        """A feed has no end at which they could be."""
        with planned_writer(any_url, block_samples=4) as writer:
            shard = writer.epoch().shard(0)
            for number in range(4):
                shard.write(sample(number))
            shard.commit_all()
            who = Membership(writer.stream, "g", "m", "life")
            with closing(LeaseClaim(any_client, who, 10.0, print)) as claim:
                claim.join("resume")
                readers = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)
                thread = threading.Thread(target=readers.run)
                thread.start()
                until(lambda: queue.holds_batches)
                assert numbers_in(queue) == list(range(4))
                queue.stop()
                thread.join(20)

    def test_a_broken_connection_leaves_nothing_to_wait_for(
        self, reader: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The new one has no answer to what was asked on it. Partitions may have moved, which ends connections."""
        placement = Placement(claim.client, claim.stream, monkeypatch)
        reader._server_clock.compare()
        reader._ask()
        reader._pause.begin(60)
        assert reader._pause.commands()
        reader._reconnect(ServerUnavailable("gone"))
        assert not reader._asked
        assert not reader._pause.is_under_way
        assert (placement.looks, reader._has_moved) == (1, False)
        reader.run()
        assert sorted(numbers_in(queue)) == list(range(COUNT))


class TestEpochThatIsGone:
    """A reader whose epoch is gone ends it with what was there, or by an error."""

    @pytest.fixture
    def ended(
        self, claim: LeaseClaim, queue: PrefetchQueue, request: pytest.FixtureRequest
    ) -> Callable[[], tuple[list[int], str]]:
        """Return a function that lets a reader, which has some samples, meet the end of its epoch.

        That returns the samples of the queue and its error.
        """
        (reader,) = SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=COUNT, views=False)._readers
        reader._server_clock.compare()
        reader._ask()
        reader._take_answer()

        def end() -> tuple[list[int], str]:
            reader._end_released(EpochNotFound("gone"))
            assert queue.is_ended
            try:
                return numbers_in(queue), str(queue.get(0) or "")
            except PenstockError as error:
                return [], f"{type(error).__name__}: {error}"

        return end

    def test_one_that_was_given_up_is_told(
        self, ended: Callable[[], tuple[list[int], str]], claim: LeaseClaim, said: list[str]
    ) -> None:
        """The training has seen less than the epoch had."""
        abandon_epoch(claim.client, claim.stream, 0)
        assert release_epoch(claim.client, claim.stream, 0)
        assert ended() == (list(range(4)), "")
        assert said == ["epoch 0 of 't' was abandoned and released while it was read"]

    def test_one_that_other_members_read_to_its_end_is_not(
        self, ended: Callable[[], tuple[list[int], str]], claim: LeaseClaim, said: list[str]
    ) -> None:
        """No sample is missing, so a message would be a false alarm."""
        close_for_group(claim.client, claim.stream, "g", 0)
        assert release_epoch(claim.client, claim.stream, 0)
        assert ended() == (list(range(4)), "")
        assert said == []

    def test_one_that_its_server_lost_is_told_by_its_loader(
        self, ended: Callable[[], tuple[list[int], str]], claim: LeaseClaim, said: list[str]
    ) -> None:
        """It may come back, and is read again then."""
        claim.client.delete(claim.stream.keys.manifest(0))
        assert ended() == (list(range(4)), "")
        assert said == []

    @pytest.mark.parametrize("what", ["epoch", "group", "stream"])
    def test_what_is_no_end_of_an_epoch_is_an_error(
        self, ended: Callable[[], tuple[list[int], str]], claim: LeaseClaim, what: str
    ) -> None:
        """The epoch is still there, its group is not, or all of it is gone."""
        if what == "group":
            drop_group(claim.client, claim.stream, "g")
            assert release_epoch(claim.client, claim.stream, 0)
        elif what == "stream":
            claim.client.delete(claim.stream.keys.meta)
        found, error = ended()
        assert found == []
        assert error.partition(":")[0] == ("StreamDeleted" if what == "stream" else "EpochNotFound"), error


class TestReadersOfSeveralServers:
    """Each server has a reader with a thread of its own, and a loop sees them as one."""

    @pytest.fixture
    def readers(
        self, any_url: str, any_client: Client, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[SharedReaders]:
        """Yield the readers of an epoch of two partitions on two servers."""
        plan(any_url, [COUNT] * 2, partitions=2)
        stream = open_stream(any_client, "t")
        Placement(any_client, stream, monkeypatch).move("b", 1)
        with closing(LeaseClaim(any_client, Membership(stream, "g", "m", "life"), 10.0, print)) as claim:
            claim.join("resume")
            yield SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False)

    def test_together_they_read_the_epoch(self, readers: SharedReaders, queue: PrefetchQueue) -> None:
        """The queue ends with the last of them."""
        readers.run()
        assert sorted(numbers_in(queue)) == list(range(2 * COUNT))
        assert queue.is_ended

    def test_they_end_with_the_last_thread_and_hold_up_no_program_that_ends(
        self, readers: SharedReaders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A loader that closes its claim under a reader would make an error of a good end."""
        ended, begun = list[bool](), threading.Event()

        def run(reader: SharedReader) -> None:
            if reader is not readers._readers[0]:
                assert begun.wait(20)
                time.sleep(0.05)  # so that a caller that does not wait for this thread comes first
            begun.set()
            ended.append(threading.current_thread().daemon)

        monkeypatch.setattr(SharedReader, "run", run)
        readers.run()
        assert ended == [False, True]

    def test_one_that_still_reads_says_what_is_waited_for(self, readers: SharedReaders) -> None:
        """The other readers have received what they waited for."""
        for number, reader in enumerate(readers._readers):
            reader._silent = {f"member {number}"}
        for number in range(2):
            assert f"what member {number} was given" in readers.why_waiting(1)
            readers._readers[number].has_ended = True
        assert "what member 0 was given" in readers.why_waiting(1)

    def test_what_one_lost_or_could_not_read_is_said_for_all(self, readers: SharedReaders) -> None:
        """A loop looks at its epoch as a whole."""
        assert (readers.loss, readers.bad_entries, readers.filled) == ("", 0, 0)
        readers._readers[1].loss = "lost"
        for number, dead_letters in enumerate(readers._dead_letters):
            dead_letters.count = number + 1
        assert (readers.loss, readers.bad_entries) == ("lost", 3)

    def test_the_manifest_of_another_server_is_asked_for_in_another_thread(
        self, readers: SharedReaders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first server has it. If it is silent, the entries of the others go on."""
        asked = list[bool]()

        def look(_: object, __: object, manifest: Manifest) -> Manifest:
            asked.append(threading.current_thread() is threading.main_thread())
            return manifest

        monkeypatch.setattr(shared, "renewed", look)
        for reader in readers._readers:
            reader._look_again()
        until(lambda: len(asked) == 2)
        assert asked == [True, False]


class TestLostPartition:
    """A partition whose server says that the group or the epoch is unknown may have lost it. Then it is waited for."""

    def test_an_epoch_that_the_roster_lost_is_waited_for_until_its_time_is_over(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its writer opens it again. If there is none, the samples are named."""
        (partition,) = claim.stream.partitions
        any_client.hdel(partition.roster, "e:0")
        assert [reader._is_lost_in(partition) for _ in range(2)] == [True, True]
        monkeypatch.setattr(shared, "LOST_S", 0.0)
        with pytest.raises(EpochIncomplete, match="cannot read epoch 0 of 't' to its end") as caught:
            reader._is_lost_in(partition)
        assert caught.value.missing == [(0, 0, COUNT)]

    def test_an_epoch_that_was_opened_again_is_read_on(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client
    ) -> None:
        """Its entries have the group. Without it, another program removed it."""
        (partition,) = claim.stream.partitions
        assert reader._is_lost_in(partition)
        any_client.xgroup_destroy(partition.entries(0), "g")
        assert not reader._is_lost_in(partition)

    @pytest.mark.parametrize("what", ["manifest", "abandoned", "released", "group"])
    def test_an_epoch_or_group_that_is_gone_everywhere_is_not_waited_for(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, what: str
    ) -> None:
        """No process brings it back, so the wait would never end."""
        (partition,) = claim.stream.partitions
        if what == "group":
            any_client.hdel(partition.roster, "g:g")
        elif what == "released":
            any_client.hset(partition.roster, "x:0", load_manifest(any_client, claim.stream, 0).id)
        elif what == "manifest":
            any_client.delete(claim.stream.keys.manifest(0))
        else:
            any_client.hset(claim.stream.keys.manifest(0), "state", "abandoned")
        any_client.hdel(partition.roster, "e:0")
        assert not reader._is_lost_in(partition)

    @pytest.mark.parametrize(
        ("lost", "may_join", "is_back"),
        [
            ("e:0", True, False),  # the group is there: the epoch alone is lost
            ("g:g", True, True),
            ("g:g", False, False),  # it was dropped
            ("e:0 g:g", True, True),
            ("e:0 g:g", False, False),
            ("", True, True),  # another thread of this member was first
        ],
    )
    @pytest.mark.parametrize("is_in_epoch", [True, False])
    def test_a_member_joins_again_where_the_roster_lost_its_group(
        self, reader: SharedReader, any_client: Client, monkeypatch: pytest.MonkeyPatch, *,
        lost: str, may_join: bool, is_back: bool, is_in_epoch: bool,
    ) -> None:  # fmt: skip
        """If the epoch is there without the group, another program took the group from it."""
        (partition,) = reader.claim.stream.partitions
        monkeypatch.setattr(shared, "rejoin", lambda *_: may_join)
        for field in lost.split():
            any_client.hdel(partition.roster, field)
        if not is_in_epoch:
            any_client.xgroup_destroy(partition.entries(0), "g")
        assert reader._rejoins(partition) is (is_back and (is_in_epoch or "e:0" in lost))


class TestAfterAnOutage:
    """A server that came back may have lost acknowledgements, and members send them again before anything is read."""

    @pytest.fixture(autouse=True)
    def times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the wait for other members long enough to fail a test which waits for it."""
        monkeypatch.setattr(shared, "OTHERS_S", 3600.0)
        monkeypatch.setattr(shared, "ACKNOWLEDGED_S", 10.0)

    def waited_s(self, reader: SharedReader) -> float:
        """Return how long the reader waits."""
        began_s = time.monotonic()
        reader._await_acknowledged()
        return time.monotonic() - began_s

    def test_a_lone_member_goes_on_once_its_own_are_there(self, reader: SharedReader) -> None:
        """No other member has acknowledgements to wait for."""
        assert self.waited_s(reader) < 5
        assert reader.queue.reader_times.doing == "server"

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
        looks = list[int]()

        def is_empty_for(_: Outboxes, number: int) -> bool:
            looks.append(number)
            return False

        monkeypatch.setattr(Outboxes, "is_empty_for", is_empty_for)
        assert 0.3 <= self.waited_s(reader) < 5
        assert len(looks) < 20, "it rests between two looks"

    def test_those_of_every_partition_are_waited_for(
        self, reader: SharedReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each server may have lost some."""
        reader._partitions *= 2
        answers = [True, False, True, True]
        monkeypatch.setattr(Outboxes, "is_empty_for", lambda *_: answers.pop(0))
        self.waited_s(reader)
        assert answers == []

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
        rank = rank_claim(claim)
        rank.join("resume")
        yield rank
        rank.close()

    @pytest.mark.parametrize("is_ordered", [False, True])
    def test_its_heartbeat_tells_others_that_it_lives(
        self, claim: LeaseClaim, rank: RankClaim, any_client: Client, is_ordered: bool
    ) -> None:
        """Its entries would be delivered to others in the middle of a long step."""
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
        """The notice finds the losses by comparing the server with its run at the join."""
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
    """A reader fetches the entries that dead members left by id, while it has a place for them."""

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

    def taken(self, queue: PrefetchQueue, *, are_alone: bool = False) -> list[tuple[int, list[int]]]:
        """Return epoch and numbers of the batches in a queue."""
        found = []
        while queue.holds_batches:
            batch = queue.get(0)
            assert batch is not None
            assert batch.is_alone is are_alone
            assert not any(span.lease.is_lost for span in batch.spans)
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
            assert self.taken(queue, are_alone=True) == [(1, numbers)]
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
        first = queue.get(0)
        assert first is not None
        assert [first["y"].tolist(), *self.taken(queue)] == [[0, 3, 4, 5], (1, [6, 7])]
        lease = first.spans[0].lease
        assert (lease.unacknowledged, lease.acknowledged) == (2, [(1, 3)])

    def test_those_that_are_gone_are_held_no_more(
        self, second: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, ids: dict[int, list[bytes]]
    ) -> None:
        """Otherwise the member would renew them for ever, and its group would wait for it."""
        for epoch in (0, 1):
            claim.leases.add(Lease(0, epoch, -1, ids[epoch][0], 1))
        abandon_epoch(claim.client, claim.stream, 0)
        assert release_epoch(claim.client, claim.stream, 0)
        claim.client.xdel(claim.stream.partitions[0].entries(1), ids[1][0])
        for epoch in (0, 1):
            claim.heartbeat.claims.append(ClaimedEntry(0, epoch, ids[epoch][0]))
            second._fetch_claims()
        assert self.taken(queue) == []
        assert 0 not in claim.leases.ids(0)
        assert not claim.heartbeat.claims

    def test_one_on_which_training_may_die_comes_once_all_before_it_was_taken(
        self, second: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, ids: dict[int, list[bytes]]
    ) -> None:
        """It would be delivered with them, and a death would be blamed on it."""
        claim.heartbeat.claims += [ClaimedEntry(0, 1, ids[1][0], 9), ClaimedEntry(0, 1, ids[1][1])]
        second._fetch_claims()
        assert not second._is_over()
        assert self.taken(queue) == [(1, [4, 5, 6, 7])]
        assert not second._is_over()
        assert self.taken(queue, are_alone=True) == [(1, [0, 1, 2, 3])]

    def test_no_more_of_them_are_fetched_than_the_loop_has_a_place_for(
        self, second: SharedReader, claim: LeaseClaim, ids: dict[int, list[bytes]]
    ) -> None:
        """A member that died may have had a gigabyte."""
        second.queue = queue = PrefetchQueue(1)
        claim.heartbeat.claims += [ClaimedEntry(0, 1, entry_id) for entry_id in ids[1]]
        thread = threading.Thread(target=second._fetch_claims)
        thread.start()
        found = list[int]()
        for number in range(1, len(ids[1]) + 1):
            until(lambda: queue.holds_batches)
            assert len(claim.leases.of(1)) == number
            found += numbers_in(queue)
        thread.join(20)
        assert found == list(range(COUNT))

    def test_one_whose_connection_breaks_is_fetched_again_on_another(
        self,
        second: SharedReader,
        claim: LeaseClaim,
        queue: PrefetchQueue,
        ids: dict[int, list[bytes]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An outage is reported and its length is limited. A mere repetition would do neither."""
        errors, reconnect = [ServerUnavailable("away")], SharedReader._reconnect

        def fetch(*given: Any) -> int:
            if len(errors) == 1:
                raise errors[0]
            return read_by_id(*given)

        def noted(reader: SharedReader, error: ServerUnavailable) -> None:
            errors.append(error)
            reconnect(reader, error)

        monkeypatch.setattr(shared, "read_by_id", fetch)
        monkeypatch.setattr(SharedReader, "_reconnect", noted)
        claim.heartbeat.claims.append(ClaimedEntry(0, 1, ids[1][0]))
        thread = threading.Thread(target=second._fetch_claims, daemon=True)
        thread.start()
        thread.join(20)
        assert errors[:1] == errors[1:]
        assert self.taken(queue) == [(1, [0, 1, 2, 3])]

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


def test_a_good_entry_counts_beside_bad_ones_of_the_same_answer(
    reader: SharedReader, claim: LeaseClaim, any_client: Client
) -> None:
    """The bad ones would wait for the end of the epoch, and hold it up."""
    partition, manifest = claim.stream.partitions[0], load_manifest(any_client, claim.stream, 0)
    given: Any = any_client.xreadgroup("g", "m", {partition.entries(0): ">"}, count=2)
    bad, good = (entry_id for entry_id, _ in given[0][1])
    came = [
        ReceivedEntry(good, 0, Lease(0, 0, 0, good, unacknowledged=4)),
        ReceivedEntry(bad, 0, None, BadEntry("damaged")),
    ]
    reader._book(came, manifest, partition)
    assert any_client.hkeys(partition.dead(0, "g")) == [bad]


class TestTheEnd:
    """An epoch is over for a reader once no member can bring more of it."""

    def entries(self, claim: LeaseClaim) -> str:
        """Return the key of the epoch's entries."""
        return claim.stream.partitions[0].entries(0)

    @pytest.fixture
    def ends(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        """Return a list of the ``is_alone`` that `DeadLetters.end` receives."""
        found = list[bool]()
        monkeypatch.setattr(DeadLetters, "end", lambda *_, is_alone: found.append(is_alone))
        return found

    def test_what_a_dead_member_holds_is_waited_for(
        self,
        reader: SharedReader,
        claim: LeaseClaim,
        queue: PrefetchQueue,
        any_client: Client,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It is delivered here, in this pass of the epoch, once its lease has lapsed. Until then the reader rests."""
        any_client.xreadgroup("g", "dead", {self.entries(claim): ">"}, count=1)
        ended = list[bool]()
        thread = threading.Thread(target=lambda: ended.append(reader._is_over()))
        thread.start()
        until(lambda: reader._silent == {"dead"})
        until(lambda: queue.reader_times.doing == "producers")
        assert "what dead was given of epoch 0 of 't' and did not acknowledge" in reader.why_waiting(1)
        assert ended == []
        looks, other_holders = list[int](), claim.other_holders

        def counted(*given: Any) -> set[str]:
            looks.append(1)
            return other_holders(*given)

        monkeypatch.setattr(claim, "other_holders", counted)
        time.sleep(0.3)
        assert len(looks) < 15
        claim.heartbeat.claims.append(ClaimedEntry(0, 0, b"1-1"))
        thread.join(20)
        assert ended == [False], "there is something to fetch"

    def test_what_a_live_member_holds_is_left_to_it(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, ends: list[bool]
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
        assert ends == [False], "the other one may have read what could not be read here"

    def test_what_this_member_was_given_and_never_got_is_claimed_first(
        self, reader: SharedReader, claim: LeaseClaim, queue: PrefetchQueue, monkeypatch: pytest.MonkeyPatch,
        ends: list[bool],
    ) -> None:  # fmt: skip
        """No other member would receive it. During the claim the loop waits for the server."""
        asked = list[tuple[Any, ...]]()

        def recover(_: object, *given: Any) -> None:
            asked.append((queue.reader_times.doing, *given))

        monkeypatch.setattr(type(claim.heartbeat), "recover", recover)
        assert reader._is_over()
        assert asked == [("server", claim.is_all_acknowledged, reader._partitions)]
        assert ends == [True]

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

    @pytest.mark.parametrize(("looks", "is_error"), [(2, False), (3, True)])
    def test_a_state_is_looked_at_more_than_once(
        self, reader: SharedReader, claim: LeaseClaim, monkeypatch: pytest.MonkeyPatch, looks: int, is_error: bool
    ) -> None:
        """Abandoning an epoch writes several keys, and a reader may look in between."""
        damaged = [DamagedKey("state")] * looks + [None]
        monkeypatch.setattr(shared, "STATE_LOOKS", 2)
        monkeypatch.setattr(shared, "STATE_LOOK_S", 0.05)
        began_s = time.monotonic()
        monkeypatch.setattr(shared, "find_state_damage", lambda *_: damaged.pop(0))
        with pytest.raises(DamagedKey) if is_error else nullcontext():
            assert reader._is_over()
        assert time.monotonic() - began_s >= 0.1

    def test_a_state_that_differs_because_the_epoch_is_being_abandoned_is_no_error(
        self, reader: SharedReader, claim: LeaseClaim, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The epoch ends with what there is."""

        def damage(*_: Any) -> DamagedKey:
            abandon_epoch(any_client, claim.stream, 0)
            return DamagedKey("state")

        monkeypatch.setattr(shared, "find_state_damage", damage)
        assert reader._is_over()

    @pytest.mark.parametrize("is_ordered", [False, True])
    def test_a_reader_that_was_stopped_says_that_it_has_ended(
        self, claim: LeaseClaim, queue: PrefetchQueue, any_client: Client, is_ordered: bool
    ) -> None:
        """A loop in another thread waits for the next batch."""
        queue.stop()
        if is_ordered:
            with closing(rank_claim(claim)) as rank:
                rank.join("resume")
                OrderedReader(rank, 0, queue, ArrayPool(4), remainder="pad", start=0, views=False).run()
        else:
            SharedReaders(claim, 0, queue, ArrayPool(4), batch_size=4, views=False).run()
        assert queue.is_ended
        assert queue.get(0) is None
