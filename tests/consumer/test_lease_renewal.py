"""The lease renewer of a member, on a test clock: what it renews, which members are dead to it, and what it claims."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import penstock
from penstock_common.errors import GroupBusy, ServerUnavailable
from penstock_common.server.client import ControlClient
from penstock_common.server.scripts import load_script
from penstock_common.stream.client import connect
from penstock_common.stream.commands import server_ms
from penstock_common.stream.entries import claim, list_held, list_overdue
from penstock_common.stream.groups import roster
from penstock_common.stream.groups.presence import MEMBER_SILENT_MS
from penstock_common.stream.groups.roster import Membership, beat_each, join_group, leave, load_roster
from penstock_common.stream.manifest import abandon_epoch
from penstock_consumer.read.claims import LeaseClaim
from penstock_consumer.read.heartbeat import LONGEST_LOOK_S, LeaseRenewer
from penstock_consumer.read.leases import Leases
from penstock_consumer.stages.batch import Lease
from tests.contracts.between import between
from tests.contracts.feed import open_stream, produce

KEEPER = "penstock_consumer.read.heartbeat"
LEASE_S = 30.0
BEAT_S = 1.0
FRESH_S = LEASE_S * 2 / 3


class Scene:
    """A member whose lease renewer runs only when it is called, and a silent member that holds entries."""

    def __init__(self, client: ControlClient) -> None:
        self.client, self.now_s, self.said = client, 0.0, list[str]()
        self.stream = open_stream(client, "t")
        self.partition = self.stream.partitions[0]
        self.who = Membership(self.stream, "g", "m", "1")
        join_group(client, self.who)
        self.held = Leases()
        self.heartbeat = LeaseRenewer(client, self.who, self.held, LEASE_S, self.said.append, lambda: self.now_s)
        self.heartbeat.horizon = 0  # the epoch is being read

    def give(self, member: str, count: int = 1) -> list[bytes]:
        """Give entries to a member."""
        taken: Any = self.client.xreadgroup("g", member, {self.partition.entries(0): ">"}, count=count)
        return [entry_id for entry_id, _ in taken[0][1]]

    def hold(self, count: int = 1) -> list[Lease]:
        """Give entries to this member, which receives them."""
        leases = [Lease(0, 0, 0, entry_id, unacknowledged=10) for entry_id in self.give("m", count)]
        for lease in leases:
            self.held.add(lease)
        return leases

    def beat(self, *, silent: bytes = b"") -> None:
        """Send one heartbeat, as the thread does. ``silent`` is an entry that was not renewed since the clock began."""
        self.age(silent)
        self.heartbeat._beat()
        self.heartbeat._after_beat()

    def age(self, silent: bytes) -> None:
        """Set the server's idle time of an entry of the other member to that of this clock."""
        if silent and silent not in self.claimed():
            idle_ms = 60_000 + int(self.now_s * 1000)
            self.client.xclaim(self.partition.entries(0), "g", "dead", 0, [silent], idle=idle_ms, justid=True)

    def beats(self, until_s: float, silent: bytes) -> None:
        """Send one heartbeat after another, at their usual times."""
        while self.now_s < until_s:
            self.now_s += BEAT_S
            self.beat(silent=silent)

    def claimed(self) -> list[bytes]:
        """Return the entries that the heartbeat claimed for the reader."""
        return [claim.entry_id for claim in self.heartbeat.claims]

    def stalled(self, function: Callable[..., Any], seconds: float, silent: bytes = b"") -> Callable[..., Any]:
        """Return the function, with a first call that a server answers only after ``seconds``."""
        stalls = [seconds]

        def answered(*args: Any, **options: Any) -> Any:
            if stalls:
                self.now_s += stalls.pop()
                self.age(silent)
            return function(*args, **options)

        return answered


@pytest.fixture
def scene(any_url: str) -> Iterator[Scene]:
    """Make an epoch of six entries that no member was given yet."""
    produce(any_url, "t", 60)
    with connect(any_url) as client:
        yield Scene(client)


class TestReclaiming:
    """A member claims the leases of other members only after they expired."""

    def test_an_entry_unrenewed_for_a_lease_is_taken_and_not_before(self, scene: Scene) -> None:
        """The other tests here show exceptions to this rule."""
        (entry,) = scene.give("dead")
        scene.beats(LEASE_S, entry)
        assert scene.claimed() == []
        scene.beats(LEASE_S * 7 / 6 + BEAT_S, entry)
        assert scene.claimed() == [entry]
        assert scene.held.holds(0, 0, entry)  # and it is renewed from now on

    def test_what_another_member_took_first_is_not_taken_from_it(self, scene: Scene) -> None:
        """Both found it free at the same moment. If both yielded it, it would be trained on twice."""
        (entry,) = scene.give("~released")
        entries = scene.partition.entries(0)

        def take() -> None:
            assert scene.client.xclaim(entries, "g", "other", 0, [entry], justid=True) == [entry]

        with between(f"{KEEPER}.list_overdue", load_script("claim_entry"), take):
            scene.heartbeat.look()
        assert scene.claimed() == []
        assert not scene.held.holds(0, 0, entry)
        assert scene.client.xpending_range(entries, "g", "-", "+", 10)[0]["consumer"] == b"other"

    def test_what_is_held_here_is_not_taken_before_a_beat_says_that_it_is_lost(self, scene: Scene) -> None:
        """Another member took and returned it, and a claim would replace a lease whose loss was not reported."""
        (lease,) = scene.hold()
        scene.client.xclaim(scene.partition.entries(0), "g", "~released", 0, [lease.entry_id], justid=True)
        scene.heartbeat.look()
        assert scene.claimed() == []
        assert (lease.is_lost, scene.said) == (False, [])
        scene.beat()
        assert lease.is_lost
        assert "lost 1 entries of epoch 0" in scene.said[0]
        scene.heartbeat.look()
        assert scene.claimed() == [lease.entry_id]

    def test_nothing_of_an_abandoned_epoch_is_taken(self, scene: Scene) -> None:
        """It takes no acknowledgements, so its pending entries would be yielded again and again."""
        first = scene.give("~released")
        scene.heartbeat.look()
        assert scene.claimed() == first
        scene.give("~released")
        abandon_epoch(scene.client, scene.stream, 0)
        scene.heartbeat.look()
        assert scene.claimed() == first

    def require_forgotten(self, scene: Scene, entry: bytes) -> None:
        """Require that earlier observations prove nothing: the entry is claimed a whole lease after the standstill, not
        before.
        """
        began_s = scene.now_s
        scene.beats(began_s + LEASE_S - BEAT_S, entry)
        assert scene.claimed() == []
        scene.beats(began_s + LEASE_S * 7 / 6 + BEAT_S, entry)
        assert scene.claimed() == [entry]

    def test_a_process_that_stood_still_forgets_what_it_saw(self, scene: Scene) -> None:
        """It was stopped for half a lease, and perhaps all others were, with the machine."""
        (entry,) = scene.give("dead")
        scene.beats(10, entry)
        scene.now_s += LEASE_S / 2 + 1
        scene.beat(silent=entry)
        self.require_forgotten(scene, entry)

    def test_a_server_that_stood_still_in_a_beat_makes_it_forget(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No member could renew during that time."""
        (entry,) = scene.give("dead")
        scene.beats(20, entry)
        monkeypatch.setattr(f"{KEEPER}.beat_each", scene.stalled(beat_each, LEASE_S / 2 + 1, entry))
        scene.now_s += BEAT_S  # a look is due with this heartbeat
        scene.beat(silent=entry)
        assert scene.claimed() == []
        self.require_forgotten(scene, entry)

    def test_a_server_that_stood_still_in_a_look_makes_it_forget(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The listing itself may be as old as the standstill."""
        (entry,) = scene.give("dead")
        scene.beats(20, entry)
        monkeypatch.setattr(f"{KEEPER}.list_overdue", scene.stalled(list_overdue, LEASE_S / 2 + 1, entry))
        scene.heartbeat.look()
        assert scene.claimed() == []
        self.require_forgotten(scene, entry)

    def test_a_beat_that_did_not_reach_the_server_makes_it_forget(self, scene: Scene) -> None:
        """A server that was away for a moment has aged every lease, also of live members."""
        (entry,) = scene.give("dead")
        scene.beats(20, entry)
        scene.heartbeat._missed()
        self.require_forgotten(scene, entry)

    def test_it_looks_for_the_dead_twelve_times_a_lease(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each look asks the server for all overdue entries, so a look at every heartbeat would be expensive."""
        looks: list[float] = []
        monkeypatch.setattr(LeaseRenewer, "look", lambda _: looks.append(scene.now_s))
        for _ in range(24):
            scene.now_s += LEASE_S / 24
            scene.beat()
        assert looks == [2.5 * number for number in range(1, 13)]


class TestEnded:
    """Leases of a member whose process ended on this host are claimed early."""

    @pytest.fixture
    def holder(self, scene: Scene) -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
        """Start a separate process that is a member, silent for long, and an entry that it holds."""
        code = "from penstock_common.stream.groups.presence import *; print(new_incarnation(), flush=True); input()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1)
        assert process.stdout is not None
        incarnation = process.stdout.readline().decode().strip()
        self.join(scene, incarnation)
        yield process, scene.give("holds")[0]
        process.kill()
        process.communicate()

    def join(self, scene: Scene, incarnation: str) -> None:
        """Join the member, as last seen an hour ago."""
        join_group(scene.client, replace(scene.who, member="holds", incarnation=incarnation))
        record = {"inc": incarnation, "seen": server_ms(scene.client, scene.partition.roster) - 3_600_000}
        scene.client.hset(scene.partition.roster, "m:g:holds", json.dumps(record))

    def test_a_stopped_process_stays_a_member_and_a_killed_one_does_not(
        self, scene: Scene, holder: tuple[subprocess.Popen[bytes], bytes]
    ) -> None:
        """SIGSTOP proves nothing: the process may continue at any time with what it holds."""
        process, entry = holder
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        scene.now_s += LONGEST_LOOK_S
        scene.beat()
        assert ("g", "holds") in load_roster(scene.client, scene.partition).members
        assert scene.claimed() == []
        process.kill()
        process.wait()
        scene.now_s += LONGEST_LOOK_S
        scene.beat()
        assert [*load_roster(scene.client, scene.partition).members] == [("g", "m")]
        assert scene.claimed() == [entry]
        assert scene.said == ["member 'holds' has ended on this host: its 1 entries are handed out again"]

    def test_what_a_new_process_took_over_by_name_is_not_taken_from_it(
        self, scene: Scene, holder: tuple[subprocess.Popen[bytes], bytes]
    ) -> None:
        """It joined under the dead member's name between the reading of the roster and the sign-off."""
        process, _ = holder
        process.kill()
        process.wait()
        with between(f"{KEEPER}.list_held", load_script("leave_group"), lambda: self.join(scene, "2")):
            scene.heartbeat.look()
        assert load_roster(scene.client, scene.partition).incarnations["g", "holds"] == "2"
        assert scene.said == []
        assert scene.client.xpending(scene.partition.entries(0), "g")["consumers"][0]["name"] == b"holds"

    def test_a_group_is_read_again_from_a_start_though_a_trainer_was_killed_just_now(
        self, scene: Scene, holder: tuple[subprocess.Popen[bytes], bytes]
    ) -> None:
        """Otherwise a user who restarts after a crash would see for 30 s that the group is being read."""
        process, _ = holder
        claim = LeaseClaim(scene.client, replace(scene.who, member="new"), LEASE_S, print)
        incarnation = load_roster(scene.client, scene.partition).incarnations["g", "holds"]
        leave(scene.client, scene.who, scene.partition, {})
        record = {"inc": incarnation, "seen": server_ms(scene.client, scene.partition.roster) - MEMBER_SILENT_MS}
        scene.client.hset(scene.partition.roster, "m:g:holds", json.dumps(record))
        with pytest.raises(GroupBusy, match="holds"):
            claim.join("earliest")
        process.kill()
        process.wait()
        claim.join("earliest")


class TestRenewing:
    """A member renews its leases."""

    def test_a_beat_renews_what_is_held(self, scene: Scene) -> None:
        """Its idle time restarts for every observer."""
        (lease,) = scene.hold()
        entries = scene.partition.entries(0)
        scene.client.xclaim(entries, "g", "m", 0, [lease.entry_id], idle=25_000, justid=True)
        scene.beat()
        (pending,) = scene.client.xpending_range(entries, "g", "-", "+", 10)
        assert int(pending["time_since_delivered"]) < 20_000
        assert not lease.is_lost

    def test_what_somebody_else_took_is_lost_and_said(self, scene: Scene) -> None:
        """Its samples must no longer be yielded here."""
        first, second = scene.hold(2)
        scene.client.xclaim(scene.partition.entries(0), "g", "other", 0, [first.entry_id], justid=True)
        scene.beat()
        assert (first.is_lost, second.is_lost) == (True, False)
        assert scene.held.ids(0) == {0: [second.entry_id]}
        assert "lost 1 entries of epoch 0: not renewed within 30 s" in scene.said[0]

    def test_leases_are_as_fresh_as_the_question_and_not_as_the_answer(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server may have renewed at the first moment of a long silence, and a lease may have lapsed since."""
        scene.beat()
        scene.now_s += FRESH_S - 1
        assert scene.heartbeat.is_fresh
        scene.now_s += 1
        assert not scene.heartbeat.is_fresh
        monkeypatch.setattr(f"{KEEPER}.beat_each", scene.stalled(beat_each, LEASE_S))
        scene.beat()
        assert not scene.heartbeat.is_fresh
        scene.beat()
        assert scene.heartbeat.is_fresh

    def test_an_answer_of_long_ago_is_renewed_before_it_is_handed_out(self, scene: Scene) -> None:
        """A process that stood still finds it in its socket, while a renewal that does not include it is under way."""
        scene.beat()
        scene.hold()
        scene.heartbeat.received(0, scene.now_s - (LEASE_S - FRESH_S))
        assert scene.heartbeat.is_fresh
        scene.heartbeat.received(1, scene.now_s - LEASE_S)
        assert scene.heartbeat.is_fresh  # of a partition that has another heartbeat
        scene.heartbeat.received(0, scene.now_s - LEASE_S)
        assert not scene.heartbeat.is_fresh
        scene.now_s += BEAT_S
        scene.beat()
        assert scene.heartbeat.is_fresh

    def test_a_renewal_that_was_under_way_does_not_count_for_an_answer_of_long_ago(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It renewed what was held when it began."""

        def received_meanwhile(*args: Any, **options: Any) -> Any:
            scene.heartbeat.received(0, scene.now_s - LEASE_S)
            return beat_each(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(f"{KEEPER}.beat_each", received_meanwhile)
            scene.beat()
        assert not scene.heartbeat.is_fresh
        scene.now_s += BEAT_S
        scene.beat()
        assert scene.heartbeat.is_fresh

    def test_an_entry_that_was_claimed_long_ago_is_renewed_before_it_is_handed_out(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This process stood still after it had claimed it."""
        scene.give("m")
        monkeypatch.setattr(f"{KEEPER}.claim", scene.stalled(claim, LEASE_S - FRESH_S + 1))
        scene.heartbeat.recover()
        assert scene.claimed()
        assert not scene.heartbeat.is_fresh
        scene.now_s += BEAT_S
        scene.beat()
        assert scene.heartbeat.is_fresh


class TestRenewingPartitions:
    """A member renews all partitions of a server together."""

    PARTITIONS = 8

    @pytest.fixture
    def heartbeat(self, any_url: str, any_client: ControlClient) -> LeaseRenewer:
        """A member of a stream of eight partitions, with its heartbeat, which knows the script by now."""
        with penstock.Writer("p", url=any_url, partitions=self.PARTITIONS):
            stream = open_stream(any_client, "p")
        who = Membership(stream, "g", "m", "1")
        join_group(any_client, who)
        found = LeaseRenewer(any_client, who, Leases(), LEASE_S, print, lambda: 0.0)
        found._beat()
        return found

    def test_it_takes_one_round_trip(self, heartbeat: LeaseRenewer, any_client: ControlClient) -> None:
        """Eight would take eight times as long on a slow network, and three times the CPU."""
        before = any_client.info("stats")["total_reads_processed"]
        heartbeat._beat()
        assert any_client.info("stats")["total_reads_processed"] - before == 2  # and that of this question

    def test_a_partition_that_forgot_the_member_keeps_no_other_from_being_renewed(
        self, heartbeat: LeaseRenewer, any_client: ControlClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that came back older forgets members of its partitions only."""
        first, *_, last = heartbeat.partitions
        before = load_roster(any_client, last).members["g", "m"]
        any_client.hdel(first.roster, "m:g:m")
        while server_ms(any_client, last.roster) == before:
            pass
        with pytest.raises(ServerUnavailable, match="come back older"):
            heartbeat._beat()
        assert load_roster(any_client, last).members["g", "m"] > before
        monkeypatch.setattr(roster, "REJOIN_SETTLE_S", 0.0)
        heartbeat._beat()
        assert ("g", "m") in load_roster(any_client, first).members


class TestRecovering:
    """A member takes back entries that were given to its own name."""

    def pending(self, scene: Scene) -> int:
        """Return the entries that the server lists under this member."""
        return len(list_held(scene.client, [(scene.partition, 0)], "g", "m"))

    def test_what_never_arrived_is_taken_back_and_what_is_held_stays(self, scene: Scene) -> None:
        """An answer was lost with its connection, or an earlier process of this name had it."""
        (lease,) = scene.hold()
        (lost,) = scene.give("m")
        scene.heartbeat.recover()
        assert scene.claimed() == [lost]
        assert scene.held.ids(0) == {0: [lease.entry_id, lost]}
        scene.heartbeat.recover()
        assert scene.claimed() == [lost]

    def test_what_is_being_acknowledged_is_not_taken_back(self, scene: Scene) -> None:
        """The server has not received it yet: taken back, the entry would be trained on twice."""
        (lease,) = scene.hold()
        scene.held.remove(0, 0, [lease.entry_id])
        scene.heartbeat.recover(lambda: False)
        assert self.pending(scene) == 1
        assert scene.claimed() == []

    def test_what_is_acknowledged_while_it_looks_is_not_taken_back(self, scene: Scene) -> None:
        """All was answered when it asked, and the loop's thread acknowledged one more before it listed."""
        (lease,) = scene.hold()

        def all_was_answered() -> bool:
            scene.held.remove(0, 0, [lease.entry_id])
            return True

        scene.heartbeat.recover(all_was_answered)
        assert self.pending(scene) == 1
        assert scene.claimed() == []

    def test_what_is_pending_though_its_acknowledgement_was_answered_is_taken_back(self, scene: Scene) -> None:
        """The server forgot the acknowledgement with its last second, and no other member would ever take the entry."""
        (lease,) = scene.hold()
        scene.held.remove(0, 0, [lease.entry_id])
        scene.heartbeat.recover(lambda: True)
        assert scene.claimed() == [lease.entry_id]
