"""The parts of a shared reader, each alone with a real server: its clock, its waits, and the claim of its member."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock_common.errors import WaitTimeout
from penstock_common.stream.commands import Client, server_ms
from penstock_common.stream.groups.losses import LossDetector, ServerRuns
from penstock_common.stream.groups.outbox import Outboxes
from penstock_common.stream.groups.roster import Membership, RankOrder, join_group, load_roster, rank_member
from penstock_consumer.read import shared
from penstock_consumer.read.claims import LeaseClaim, RankClaim
from penstock_consumer.read.fetch_plan import FetchPlanner
from penstock_consumer.read.ordered import RowPlan
from penstock_consumer.read.receive import ReceivedEntry
from penstock_consumer.read.shared import ServerClock, SharedReader, SharedReaders
from penstock_consumer.stages.batch import ArrayPool
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped
from tests.clusters import until
from tests.contracts.feed import loader_of, open_stream, produce
from tests.contracts.ordered import plan, rank_of

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
    def test_a_server_that_is_replaced_before_the_first_heartbeat_is_noticed(
        self, claim: LeaseClaim, rank: RankClaim, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
    ) -> None:
        """What it lost is named by comparing with the run that was there at the join."""
        kept: LeaseClaim | RankClaim = rank if is_ordered else claim
        learned = list[str]()
        monkeypatch.setattr(LossDetector, "check", lambda _: learned.append("losses"))
        monkeypatch.setattr(ServerRuns, "learn", lambda _: learned.append("runs"))
        monkeypatch.setattr(type(kept.heartbeat), "start", lambda _: learned.append("heartbeat"))
        kept.keep()
        assert learned == ["losses", "runs", "heartbeat"]
