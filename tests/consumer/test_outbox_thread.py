"""Tests of a member's acknowledgements to several servers. Each server has a thread, so that none delays the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock_common.errors import MemberReplaced, ServerUnavailable
from penstock_common.server.channel import Channel, Command
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.groups import outbox
from penstock_common.stream.groups.ledger import Acknowledgement, done_bits, uncovered
from penstock_common.stream.groups.outbox import Outbox, Outboxes, OutboxThread, Probe, no_probe
from penstock_common.stream.groups.positions import PositionReport, known_positions
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.manifest import load_manifest
from penstock_common.waiting import OUTAGE_S
from tests.clusters import until
from tests.consumer.test_positions import rank
from tests.contracts.feed import open_stream
from tests.contracts.ordered import plan
from tests.placed import Placement
from tests.torn_slots import partition_slot

LAST = 80


class Rank:
    """A rank that reports its positions through a thread."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.who: Membership = rank(client, 0, world=1)
        self.manifest = load_manifest(client, self.who.stream, 0)
        self.probes: list[int] = []
        self.outbox = Outbox(client, self.who, notify=lambda _: None, probe=self._probe)
        self.box = OutboxThread(self.outbox)

    def _probe(self, limit_ms: int) -> list[Command]:
        self.probes.append(limit_ms)
        return [(b"HSET", b"touched", b"at", b"%d" % time.time_ns()), (b"WAIT", b"1", b"%d" % limit_ms)]

    def report(self, position: int) -> None:
        """Report in the background."""
        self.box.send(PositionReport(self.manifest, self.who, position))

    @property
    def reported(self) -> int:
        """Return the position that the server knows."""
        return known_positions(self.client, self.who.stream, 0, "g").of(0)


@pytest.fixture
def reporting(any_url: str, any_client: Client) -> Iterator[Rank]:
    """Return a rank of a produced epoch."""
    plan(any_url, [LAST])
    rank = Rank(any_client)
    yield rank
    rank.box.close()
    until(lambda: not threads())


@pytest.fixture
def together(reporting: Rank) -> Rank:
    """Return a rank whose reports of ten minutes are sent together."""
    reporting.box = OutboxThread(reporting.outbox, 600.0)
    return reporting


def threads() -> list[threading.Thread]:
    """Return the threads of outboxes that run."""
    return [thread for thread in threading.enumerate() if thread.name == "penstock-outbox"]


def test_what_is_sent_arrives_in_order_though_nobody_flushes(reporting: Rank) -> None:
    """A training loop sends, and goes on."""
    assert threads() == []
    assert reporting.box.is_empty
    reporting.box.flush()
    for position in range(8, LAST + 1, 8):
        reporting.report(position)
    until(lambda: reporting.reported == LAST)
    until(lambda: reporting.box.is_empty)
    assert len(threads()) == 1
    reporting.box.close()
    until(lambda: not threads())
    reporting.box.flush()  # returns, though there is no thread any more


def test_a_flush_returns_once_all_is_on_the_server(reporting: Rank) -> None:
    """A saved state relies on it."""
    for position in range(8, LAST + 1, 8):
        reporting.report(position)
        reporting.box.flush()
        assert reporting.reported == position
        assert reporting.box.is_empty


def test_what_a_server_lost_is_sent_again_though_the_loop_is_in_a_long_step(reporting: Rank) -> None:
    """Until then another member may receive the same samples."""
    before = partition_slot(reporting.client, reporting.who.stream, 0)
    reporting.report(8)
    reporting.box.flush()
    before.restore(reporting.client)
    assert reporting.reported == 0
    reporting.client.client_kill_filter(_type="normal", skipme=True)
    until(lambda: reporting.reported == 8)


def test_a_refusal_is_raised_by_one_later_call(reporting: Rank) -> None:
    """The loop learns that another process has its name, and a call that cleans up does not raise it again."""
    rank(reporting.client, 0, world=1)
    reporting.report(8)
    with pytest.raises(MemberReplaced):
        reporting.box.flush()
    reporting.box.flush()
    calls: list[Callable[[], None]] = [lambda: reporting.report(16), reporting.box.attend]
    for call in calls:
        reporting.report(8)
        until(lambda: reporting.box._error is not None)
        with pytest.raises(MemberReplaced):
            call()
    assert reporting.reported == 0


def test_what_is_sent_when_an_earlier_refusal_is_raised_arrives(reporting: Rank) -> None:
    """Else its samples would be given out again, though they were trained on."""
    successor = rank(reporting.client, 0, world=1)
    with pytest.raises(MemberReplaced):
        for position in range(1, LAST):
            who = reporting.who if position == 1 else successor
            reporting.outbox.send(PositionReport(reporting.manifest, who, position))
    assert position < LAST - 1
    until(lambda: reporting.reported == position)


def test_the_end_of_an_epoch_asks_for_a_replica(reporting: Rank) -> None:
    """Only what a replica has may rest on it."""
    reporting.box.confirm()
    assert reporting.probes == []  # nothing was sent
    reporting.report(8)
    reporting.box.confirm()
    assert len(reporting.probes) == 1
    assert reporting.reported == 8
    assert len(reporting.outbox._answered) == 1  # no replica has it
    reporting.report(16)
    reporting.box.forget()
    assert reporting.reported == 16
    assert len(reporting.outbox._answered) == 0


def test_a_server_that_does_not_answer_holds_up_neither_the_loop_nor_the_end(
    reporting: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member leaves with what it could send, and an error says that something is missing."""
    answers = threading.Event()
    read = Channel.read

    def slow(channel: Channel, *arguments: object) -> object:
        if threading.current_thread().name == "penstock-outbox":
            answers.wait(20)
        return read(channel, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Channel, "read", slow)
    began = time.monotonic()
    for position in range(8, LAST + 1, 8):
        reporting.report(position)
    reporting.box.attend()
    assert not reporting.box.is_empty
    assert time.monotonic() - began < 1
    reporting.box.limit_patience(0.05)
    with pytest.raises(ServerUnavailable, match="has not answered all acknowledgements yet"):
        reporting.box.flush()
    assert 0.3 < time.monotonic() - began < 5
    answers.set()
    until(lambda: reporting.box.is_empty)
    assert reporting.reported == LAST


def held_up(reporting: Rank, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the thread begin to send a report. It goes on once the event is set."""
    begun, may_go, send = threading.Event(), threading.Event(), reporting.outbox.send

    def slow(due: PositionReport) -> None:
        begun.set()
        may_go.wait(20)
        send(due)

    monkeypatch.setattr(reporting.outbox, "send", slow)
    reporting.report(8)
    assert begun.wait(20)
    return may_go


def test_what_is_under_way_is_not_taken_for_done(reporting: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved state would count it, and an epoch would be closed without it."""
    may_go = held_up(reporting, monkeypatch)
    assert not reporting.box.is_empty
    assert not reporting.box.hand_over(reporting.outbox, lambda _: True, no_probe)
    reporting.box.limit_patience(0.05)
    with pytest.raises(ServerUnavailable, match="has not answered all acknowledgements yet"):
        reporting.box.flush()
    may_go.set()
    until(lambda: reporting.box.is_empty)
    assert reporting.reported == 8


def test_a_thread_that_connects_after_the_end_closes_its_connection(
    reporting: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that reads one stream after another would keep a connection for each."""
    may_go = held_up(reporting, monkeypatch)
    reporting.box.close()
    may_go.set()
    until(lambda: not threads())
    assert reporting.reported == 8
    assert reporting.outbox._channel is None


def test_a_caller_in_a_hurry_does_not_wait_for_a_silent_server(reporting: Rank) -> None:
    """The connection is there, and no answer comes. A loop that is not in a hurry waits half a minute for one."""
    reporting.outbox.send(PositionReport(reporting.manifest, reporting.who, 8))
    reporting.outbox.flush()
    reporting.client.client_pause(8000, all=False)
    began_s = time.monotonic()
    reporting.outbox.limit_patience(0.1)
    reporting.outbox.send(PositionReport(reporting.manifest, reporting.who, 16))
    with pytest.raises(ServerUnavailable):
        reporting.outbox.flush()
    assert time.monotonic() - began_s < 6
    assert not reporting.outbox.hand_over(reporting.outbox, lambda _: True, no_probe)
    reporting.client.client_unpause()
    reporting.outbox.flush()
    assert reporting.reported == 16


@pytest.mark.parametrize(
    ("numbers", "every_s", "count"), [([[0, 1]], 0.0, 0), ([[0, 1]], 0.01, 1), ([[0], [1]], 0.0, 2)]
)
def test_a_member_of_several_servers_has_a_thread_for_each(
    any_url: str, any_client: Client, numbers: list[list[int]], every_s: float, count: int
) -> None:
    """One that is away must not hold up the acknowledgements to another. With one server a thread only costs time."""
    plan(any_url, [8, 8], partitions=2)
    stream, manifest = open_stream(any_client, "t"), load_manifest(any_client, open_stream(any_client, "t"), 0)
    join_group(any_client, Membership(stream, "shared", "m", "life"))
    boxes = Outboxes(any_client, Membership(stream, "shared", "m", "life"), numbers, every_s=every_s)
    for number in (0, 1):
        shard = next(shard for shard in (0, 1) if stream.partition_of(shard).number == number)
        boxes.send(number, Acknowledgement(stream.partitions[number], manifest, "shared", [], {shard: [(0, 8)]}))
    assert len(threads()) == count
    boxes.flush()
    assert boxes.is_empty
    assert all(boxes.is_empty_for(number) for number in (0, 1))
    assert uncovered(any_client, stream, manifest, "shared") == []
    boxes.close()
    until(lambda: not threads())


def test_partitions_that_move_to_another_server_have_an_outbox_of_their_own(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is away must not hold up the others. One that takes over may lack what its partitions had."""
    plan(any_url, [8] * 3, partitions=3)
    stream, manifest = open_stream(any_client, "t"), load_manifest(any_client, open_stream(any_client, "t"), 0)
    who, placement = Membership(stream, "shared", "m", "life"), Placement(any_client, stream, monkeypatch)
    join_group(any_client, who)
    before, probes = partition_slot(any_client, stream, 1), dict[tuple[int, ...], Probe]()

    def probe_of(numbers: Sequence[int]) -> Probe:
        return probes.setdefault((*numbers,), lambda _: [])

    boxes = Outboxes(any_client, who, [[0, 1, 2]], probe_of=probe_of)
    shards = {stream.partition_of(shard).number: shard for shard in range(3)}

    def acknowledge(number: int, lo: int, hi: int) -> None:
        boxes.send(
            number, Acknowledgement(stream.partitions[number], manifest, "shared", [], {shards[number]: [(lo, hi)]})
        )

    def acknowledged(number: int) -> int:
        bits = done_bits(any_client, stream.partitions[number], 0, "shared", shards[number], 0, 8)
        return int(bits.sum())

    for number in range(3):
        acknowledge(number, 0, 4)
    boxes.flush()
    placement.move("a", 0, 1, 2)
    acknowledge(0, 4, 5)
    assert (boxes._servers, threads()) == ([[0, 1, 2]], []), "they are together"
    before.restore(any_client)
    any_client.script_flush()
    placement.move("b", 1)
    acknowledge(0, 5, 6)
    assert boxes._moves == any_client.moves
    assert boxes._servers == [[0, 2], [1]]
    until(lambda: acknowledged(1) == 4)
    old, new = boxes._boxes
    assert [boxes._of_partitions[number] for number in range(3)] == [old, new, old]
    assert len(threads()) == 2
    for number, lo in ((0, 6), (1, 4), (2, 4)):
        acknowledge(number, lo, 8)
    boxes.flush()
    assert uncovered(any_client, stream, manifest, "shared") == []
    assert isinstance(old, OutboxThread)
    assert isinstance(new, OutboxThread)
    assert [len(box._outbox._answered) for box in (old, new)] == [6, 2]
    assert [box._outbox._probe for box in (old, new)] == [probes[0, 2], probes[1,]]
    boxes.limit_patience(60)
    placement.move("c", 2)
    boxes.attend()
    assert boxes._servers == [[0, 2], [1]], "a member that ends needs no other outbox"
    boxes.close()
    until(lambda: not threads())


def test_an_outbox_that_is_at_work_is_divided_later(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two outboxes that send the same acknowledgements could send an older one last."""
    plan(any_url, [8] * 2, partitions=2)
    stream, manifest = open_stream(any_client, "t"), load_manifest(any_client, open_stream(any_client, "t"), 0)
    who, placement = Membership(stream, "shared", "m", "life"), Placement(any_client, stream, monkeypatch)
    join_group(any_client, who)
    boxes = Outboxes(any_client, who, [[0, 1]], every_s=600.0)
    for number in (0, 1):
        shard = next(shard for shard in (0, 1) if stream.partition_of(shard).number == number)
        boxes.send(number, Acknowledgement(stream.partitions[number], manifest, "shared", [], {shard: [(0, 8)]}))
    placement.move("b", 1)
    boxes.attend()
    boxes.flush()
    boxes.attend()
    assert boxes._servers == [[0], [1]]
    boxes.flush()
    assert uncovered(any_client, stream, manifest, "shared") == []
    boxes.close()
    until(lambda: not threads())


def test_an_outbox_that_takes_over_loads_the_scripts_that_its_server_lacks(reporting: Rank) -> None:
    """A server that takes over never heard of them. It would refuse the same acknowledgements again and again."""
    reporting.outbox.send(PositionReport(reporting.manifest, reporting.who, 8))
    reporting.outbox.flush()
    other = Outbox(reporting.client, reporting.who, notify=lambda _: None)
    assert reporting.outbox.hand_over(other, lambda _: True, no_probe)
    reporting.client.script_flush()
    box = OutboxThread(other)
    box.attend()
    until(lambda: box.is_empty)
    box.close()


def sent(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the position of each report that is sent."""
    found: list[int] = []
    send = outbox.send

    def counted(due: PositionReport) -> None:
        found.append(due.position)
        send(due)

    monkeypatch.setattr(outbox, "send", counted)
    return found


@pytest.mark.parametrize("ask", [OutboxThread.flush, OutboxThread.attend, OutboxThread.confirm, OutboxThread.forget])
def test_reports_of_one_time_are_sent_together_and_at_once_for_who_waits(
    together: Rank, monkeypatch: pytest.MonkeyPatch, ask: Callable[[OutboxThread], None]
) -> None:
    """A call for each tiny batch takes more time than the batch. A saved state waits for all of them."""
    found = sent(together.outbox, monkeypatch)
    together.report(8)
    until(lambda: together.box.is_empty)  # nothing came before it
    for position in range(16, LAST, 8):
        together.report(position)
    assert not together.box.is_empty
    ask(together.box)
    until(lambda: together.box.is_empty)
    assert together.reported == LAST - 8
    assert found == [8, LAST - 8]
    together.report(LAST)
    assert not together.box.is_empty
    ask(together.box)
    until(lambda: together.reported == LAST)


def test_reports_of_one_time_are_sent_though_nobody_waits(reporting: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may be long, and the quota of writers may depend on what is done."""
    monkeypatch.setattr(outbox, "LOOK_S", 3600.0)
    reporting.box = OutboxThread(reporting.outbox, 0.05)
    found = sent(reporting.outbox, monkeypatch)
    for position in range(1, LAST + 1):
        reporting.report(position)
        time.sleep(0.002)
    until(lambda: reporting.reported == LAST)
    assert 1 < len(found) < LAST / 2


def test_a_caller_in_a_hurry_does_not_wait_for_a_server_that_is_gone(fresh_server: Callable[..., Any]) -> None:
    """A trainer that ends must not hold its host for the patience of an outage, which is a minute."""
    server = fresh_server()
    plan(server.url, [LAST])
    with connect(server.url) as client:
        rank = Rank(client)
        rank.outbox.send(PositionReport(rank.manifest, rank.who, 8))
        rank.outbox.flush()
        server.kill()
        began_s = time.monotonic()
        rank.outbox.limit_patience(0.2)
        with pytest.raises(ServerUnavailable):
            rank.outbox.flush()
        assert time.monotonic() - began_s < OUTAGE_S / 2
        rank.outbox.close()
