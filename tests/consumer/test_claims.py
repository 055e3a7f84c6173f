"""Tests of what a member's claim says of epochs and positions, with a real server but no reader or heartbeat thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from penstock_common.errors import (
    EpochIncomplete,
    EpochNotFound,
    GroupBusy,
    ReplayTruncated,
    ServerUnavailable,
    StreamDeleted,
)
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import pending_members
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.ledger import acknowledge, done_bits, uncovered
from penstock_common.stream.groups.losses import LossDetector
from penstock_common.stream.groups.outbox import Outboxes
from penstock_common.stream.groups.positions import known_positions, report
from penstock_common.stream.groups.roster import Membership, RankOrder, join_group, load_roster, note_wait, rank_member
from penstock_common.stream.keys import RELEASED
from penstock_common.stream.manifest import abandon_epoch, find_manifest, load_manifest
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.streams import Stream
from penstock_consumer.read import claims
from penstock_consumer.read.claims import LeaseClaim, RankClaim, absent_notice
from penstock_consumer.read.heartbeat import ClaimedEntry
from penstock_consumer.stages.batch import Batch, BatchSpan, Lease
from tests.contracts.feed import SAMPLE_BYTES, open_stream
from tests.contracts.ordered import plan, planned_writer

COUNT, BLOCK, EPOCHS = 16, 4, 4
WORLD, BATCH = 2, 2
STEP = WORLD * BATCH


def busy(*_: Any, **__: Any) -> int:
    """Refuse to join."""
    raise GroupBusy("always")


class Claims:
    """A stream with some epochs, and claims on it."""

    def __init__(self, client: Client, stack: ExitStack) -> None:
        self.client, self._stack = client, stack
        self.said: list[str] = []

    @property
    def stream(self) -> Stream:
        """Return the stream as it is now."""
        return open_stream(self.client, "t")

    def member(self, name: str = "m", group: str = "g") -> LeaseClaim:
        """Return the claim of a member that has not joined."""
        claim = LeaseClaim(self.client, Membership(self.stream, group, name, f"life of {name}"), 30.0, self.said.append)
        return self._stack.enter_context(closing(claim))

    def rank(self, number: int = 0, world: int = WORLD) -> RankClaim:
        """Return the claim of a rank that has not joined."""
        order = RankOrder(number, world, BATCH)
        who = Membership(self.stream, "ranks", rank_member(number), f"life of {number}", order)
        return self._stack.enter_context(closing(RankClaim(self.client, who, 30.0, self.said.append)))

    def deliver(self, member: str, count: int, epoch: int = 0) -> list[bytes]:
        """Let the server give entries to a member, and return their ids."""
        key = self.stream.partitions[0].entries(epoch)
        answer: Any = self.client.xreadgroup("g", member, {key: ">"}, count=count)
        return [entry_id for entry_id, _ in answer[0][1]]


@pytest.fixture
def scene(any_url: str, any_client: Client) -> Iterator[Claims]:
    """Yield claims on four epochs of two shards in one partition."""
    plan(any_url, [COUNT // 2] * 2, block_samples=BLOCK, epochs=EPOCHS)
    with ExitStack() as stack:
        yield Claims(any_client, stack)


class TestJoining:
    """A group begins with the epochs that the stream still has, and goes back to those."""

    def test_a_new_group_begins_behind_what_was_released(self, scene: Claims) -> None:
        """It would wait for epochs that never come again."""
        assert release_epoch(scene.client, scene.stream, 1)
        early = scene.member(group="early")
        early.join("resume")
        assert early.first == 0, "the first epoch is there"
        assert release_epoch(scene.client, scene.stream, 0)
        late = scene.member(group="late")
        late.join("resume")
        assert late.first == 2
        chosen = scene.member(group="chosen")
        chosen.join(3)
        assert chosen.first == 3

    @pytest.mark.parametrize("trimmed", [1, EPOCHS - 1])
    def test_a_group_is_read_again_from_the_first_epoch_that_is_whole(self, scene: Claims, trimmed: int) -> None:
        """Entries of a trimmed epoch are gone, which no reader could tell from a loss."""
        scene.client.hset(scene.stream.partitions[0].roster, mapping={"t:0": "1", f"t:{trimmed}": "1"})
        member = scene.member()
        member.join("resume")
        member.join("earliest")
        assert member.first == trimmed + 1
        rank = scene.rank()
        rank.join("earliest")
        assert rank.first == trimmed + 1

    def test_a_group_of_a_stream_without_an_epoch_begins_with_the_first(self, any_url: str, any_client: Client) -> None:
        """Trainers may be started before their producers."""
        with planned_writer(any_url), ExitStack() as stack:
            scene = Claims(any_client, stack)
            for start in ("resume", "earliest"):
                member, rank = scene.member(), scene.rank(0, 1)
                member.join(start)
                rank.join(start)
                assert (member.first, rank.first) == (0, 0)

    def test_a_group_that_others_read_is_not_reset_under_them(self, scene: Claims) -> None:
        """They would train on samples again without a message. The error names the members to stop."""
        scene.member("elsewhere", group="other").join("resume")
        claim = scene.member()
        claim.join("resume")
        claim.join("earliest")
        late = scene.member("late")
        busy = r"group 'g' of 't' is read by m \(seen \d s ago\): start='earliest' would reset it"
        with pytest.raises(GroupBusy, match=busy) as caught:
            late.join("earliest")
        # the one that it names may have been killed a moment ago
        assert str(caught.value).endswith("one that has ended counts as gone at most 30 s after it was last seen")
        late.join("resume")

    def test_only_retained_epochs_are_gone_back_to(self, scene: Claims) -> None:
        """The error says which they are. An epoch that is still to come may be waited for."""
        assert release_epoch(scene.client, scene.stream, 0)
        with pytest.raises(EpochNotFound, match=r"epoch 0 of 't' is not retained; retained: 1, 2, 3"):
            scene.member().join(0)
        with pytest.raises(ReplayTruncated, match=r"epoch 0 of 't' was released.*; retained: 1, 2, 3\. ") as caught:
            scene.rank().join(0)
        assert "Without this state or start= the group goes on where it stands" in str(caught.value)
        assert "declared group (`penstock groups declare t " in str(caught.value)
        scene.rank().join(EPOCHS)
        member = scene.member()
        member.join(EPOCHS)
        assert member.first == EPOCHS

    def test_a_rank_of_another_number_of_ranks_asks_now_and_then_whether_those_are_gone(
        self, scene: Claims, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A training that is started again with other ranks begins a moment after the last of the old ones died."""
        scene.rank(1, 2).join("resume")
        asked = list[int]()

        def counted(*given: Any, **named: Any) -> int:
            asked.append(1)
            return join_group(*given, **named)

        monkeypatch.setattr(claims, "join_group", counted)
        rank = scene.rank(0, 4)
        monkeypatch.setattr(rank, "_quiet_ms", 700)
        rank.join("resume")
        assert load_roster(scene.client, scene.stream.partitions[0]).groups["ranks"].world == 4
        assert 1 < len(asked) < 12
        monkeypatch.setattr(rank, "_quiet_ms", 100)
        monkeypatch.setattr(claims, "join_group", busy)
        with pytest.raises(GroupBusy, match="always"):
            rank.join("resume")

    @pytest.mark.parametrize(("lease_s", "quiet_ms"), [(1.0, 1000), (6.0, 1000), (30.0, 5000), (60.0, 10_000)])
    def test_ranks_that_were_silent_for_five_heartbeats_are_gone(
        self, scene: Claims, monkeypatch: pytest.MonkeyPatch, lease_s: float, quiet_ms: int
    ) -> None:
        """A heartbeat may be late by a second. A training with other ranks waits twice as long, and then fails."""
        asked, limits = list[int](), list[float]()
        monkeypatch.setattr(claims, "join_group", lambda *_, quiet_ms, **__: asked.append(quiet_ms))
        monkeypatch.setattr(claims, "Wait", lambda _, limit_s: limits.append(limit_s))
        who = Membership(scene.stream, "ranks", rank_member(0), "life", RankOrder(0, WORLD, BATCH))
        with closing(RankClaim(scene.client, who, lease_s, print)) as rank:
            rank.join("resume")
        assert asked == [quiet_ms]
        assert limits == [2 * quiet_ms / 1000]

    def test_a_server_that_is_away_is_waited_for_and_not_for_ever(
        self, scene: Claims, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A restart takes seconds. A program that waits for days seems to work."""
        borne, away = list[str](), 3

        class Outage:
            def __init__(self, *_: Any) -> None:
                pass

            def bear(self, error: ServerUnavailable) -> None:
                borne.append(str(error))
                if len(borne) > 3:
                    raise error

            def over(self) -> None:
                borne.append("answers")

        def ask() -> None:
            nonlocal away
            away -= 1
            if away >= 0:
                raise ServerUnavailable("away")

        monkeypatch.setattr(claims, "Outage", Outage)
        claim = scene.member()
        claim._bear(ask)
        assert borne == ["away", "away", "away", "answers"]
        away = 99
        with pytest.raises(ServerUnavailable):
            claim._bear(ask)


class TestEpochs:
    """The fate of an epoch decides whether a reader ends it, waits, or fails."""

    def test_an_epoch_is_released_once_a_roster_says_so(self, scene: Claims) -> None:
        """That a roster lacks it is no release, because a server that came back older lacks it, too."""
        claim, (partition,) = scene.member(), scene.stream.partitions
        claim.join("resume")
        assert not claim.is_released(1)
        for field in ("e:1", "retiring"):
            assert not claim.is_released(1)
            scene.client.hdel(partition.roster, field)
        assert not claim.is_released(1)
        assert claim.loss_of(1) == ""
        scene.client.hset(partition.roster, "e:1", load_manifest(scene.client, scene.stream, 1).id)
        assert release_epoch(scene.client, scene.stream, 1)
        assert claim.is_released(1)
        assert claim.loss_of(1) == ""
        assert not claim.is_released(2)

    def test_a_manifest_that_is_gone_without_a_release_is_a_loss(self, scene: Claims) -> None:
        """The training reads on, and the epoch again once its producer has opened it again."""
        claim = scene.member()
        claim.join("resume")
        scene.client.delete(scene.stream.keys.manifest(2))
        assert not claim.is_released(2)
        assert "epoch 2 of 't' is gone, and nobody released it" in claim.loss_of(2)
        assert "It is read again once its producer opens it again" in claim.loss_of(2)

    def test_what_others_hold_is_told_from_what_is_held_here(self, scene: Claims) -> None:
        """A member waits at the end of an epoch for others only."""
        claim, partitions = scene.member(), scene.stream.partitions
        claim.join("resume")
        assert claim.other_holders(0, partitions) == set()
        scene.deliver("m", 1)
        assert claim.other_holders(0, partitions) == set()
        scene.deliver("other", 1)
        assert claim.other_holders(0, partitions) == {"other"}
        assert claim.other_holders(1, partitions) == set()
        assert claim.has_unread(0)
        scene.deliver("other", 100)
        assert not claim.has_unread(0)
        claim.unclosed |= {0, 1}
        assert claim.reopened() == {1}, "what was repaired is unread"

    def test_a_release_that_one_of_several_rosters_notes_counts(self, any_url: str, any_client: Client) -> None:
        """The others have it on their rosters until their turn comes."""
        plan(any_url, [COUNT] * 3, partitions=3)
        with ExitStack() as stack:
            claim = Claims(any_client, stack).member()
            claim.join("resume")
            roster = claim.stream.partitions[1].roster
            any_client.hset(roster, "x:0", load_manifest(any_client, claim.stream, 0).id)
            assert not claim.is_released(0)
            any_client.hdel(roster, "e:0")
            assert claim.is_released(0)

    def test_what_one_of_several_partitions_has_is_unread(self, any_url: str, any_client: Client) -> None:
        """A repair writes to one partition, and no error may name its samples as lost."""
        plan(any_url, [COUNT] * 2, partitions=2)
        with ExitStack() as stack:
            claim = Claims(any_client, stack).member()
            claim.join("resume")
            first, second = (partition.entries(0) for partition in claim.stream.partitions)
            any_client.xreadgroup("g", "other", {first: ">"})
            assert claim.has_unread(0)
            claim.close_epochs(0)
            assert claim.unclosed == {0}
            any_client.xreadgroup("g", "other", {second: ">"})
            assert not claim.has_unread(0)
            any_client.xack(first, "g", *[entry_id for entry_id, _ in any_client.xrange(first)])
            claim.close_epochs(0)
            assert claim.unclosed == {0}, "the second partition's entries are held"

    def test_a_member_lives_if_it_gave_a_heartbeat_since(self, scene: Claims) -> None:
        """Only then what it holds will be acknowledged or returned."""
        claim, (partition,) = scene.member(), scene.stream.partitions
        claim.join("resume")
        join_group(scene.client, Membership(scene.stream, "elsewhere", "x", "life"))
        seen = load_roster(scene.client, partition).members["g", "m"]
        assert claim.live_members(seen - 1, partition) == {"m"}
        assert claim.live_members(seen, partition) == set()

    def test_what_an_earlier_process_of_its_name_had_is_claimed(self, scene: Claims) -> None:
        """No other member would receive it, because the server takes the new process for the old one."""
        claim = scene.member()
        claim.join("resume")
        assert claim.recover() == set()
        ids = {epoch: scene.deliver("m", 1, epoch) for epoch in (0, 2)}
        assert claim.recover() == {0, 2}
        assert {one.epoch: [one.entry_id] for one in claim.heartbeat.claims} == ids
        assert claim.reopened() == {0, 2}

    def test_an_epoch_closes_once_all_of_it_is_acknowledged(self, scene: Claims) -> None:
        """An epoch that is closed too early is released under its readers."""
        claim, (partition,) = scene.member(), scene.stream.partitions
        claim.join("resume")
        manifest = load_manifest(scene.client, scene.stream, 0)

        def closed() -> set[int]:
            return {epoch for group, epoch in load_roster(scene.client, partition).closed if group == "g"}

        first, *rest = scene.deliver("m", 100)
        claim.close_epochs(0)
        assert (closed(), claim.unclosed) == (set(), {0})
        whole = {shard: [(0, COUNT // 2)] for shard in (0, 1)}
        assert acknowledge(scene.client, partition, manifest, "g", rest, {**whole, 0: [(BLOCK, COUNT // 2)]})
        claim.close_epochs(0)
        assert (closed(), claim.unclosed) == (set(), {0})
        assert acknowledge(scene.client, partition, manifest, "g", [first], whole)
        claim.close_epochs(0)
        assert (closed(), claim.unclosed) == ({0}, set())
        abandon_epoch(scene.client, scene.stream, 1)
        claim.unclosed.add(2)
        claim.close_epochs(1)
        assert (closed(), claim.unclosed) == ({0}, {2})

    @pytest.mark.parametrize("what", ["lost", "released", "deleted"])
    def test_samples_that_no_member_will_deliver_are_named(self, scene: Claims, what: str) -> None:
        """No entry is pending or unread, and the ledger lacks them. It also lacks them if another member was first."""
        claim, (partition,) = scene.member(), scene.stream.partitions
        claim.join("resume")
        scene.client.xack(partition.entries(0), "g", *scene.deliver("m", 100))
        if what == "released":
            scene.client.hset(partition.roster, "x:0", load_manifest(scene.client, scene.stream, 0).id)
            scene.client.hdel(partition.roster, "e:0")
            claim.close_epochs(0)
            assert claim.unclosed == set()
        elif what == "deleted":
            scene.client.delete(claim.stream.keys.meta)
            with pytest.raises(StreamDeleted):
                claim.close_epochs(0)
        else:
            with pytest.raises(EpochIncomplete, match=f"cannot be given {COUNT} samples") as caught:
                claim.close_epochs(0)
            assert caught.value.missing == [(0, 0, COUNT // 2), (1, 0, COUNT // 2)]

    @pytest.mark.parametrize("look", ["uncovered", "has_unread", "pending_members"])
    def test_what_another_member_takes_behind_a_look_is_not_missing(
        self, scene: Claims, monkeypatch: pytest.MonkeyPatch, look: str
    ) -> None:
        """A server that was replaced gives entries out again. Another member may be given them between two looks."""
        claim = scene.member()
        claim.join("resume")
        ask, taken = getattr(claims, look), list[bytes]()

        def asked(*arguments: Any, **options: Any) -> Any:
            answer = ask(*arguments, **options)
            if not taken:
                taken.extend(scene.deliver("other", 100))
            return answer

        monkeypatch.setattr(claims, look, asked)
        claim.close_epochs(0)
        assert claim.unclosed == {0}
        monkeypatch.undo()
        scene.client.xack(scene.stream.partitions[0].entries(0), "g", *(taken or scene.deliver("other", 100)))
        with pytest.raises(EpochIncomplete):
            claim.close_epochs(0)

    @pytest.mark.parametrize("looks", range(1, claims.CLOSE_LOOKS))
    def test_what_another_member_acknowledges_again_after_a_look_is_not_missing(
        self, scene: Claims, monkeypatch: pytest.MonkeyPatch, looks: int
    ) -> None:
        """A server that was replaced lost the acknowledgement, and the member has sent it again since."""
        claim, (partition,) = scene.member(), scene.stream.partitions
        claim.join("resume")
        manifest = load_manifest(scene.client, scene.stream, 0)
        scene.client.xack(partition.entries(0), "g", *scene.deliver("other", 100))
        looked = 0

        def look(*arguments: Any) -> list[tuple[int, int, int]]:
            nonlocal looked
            if looked == looks:
                acknowledge(scene.client, partition, manifest, "g", [], {shard: [(0, COUNT // 2)] for shard in (0, 1)})
            looked += 1
            return uncovered(*arguments)

        monkeypatch.setattr(claims, "uncovered", look)
        claim.close_epochs(0)
        assert claim.unclosed == set()


class TestLeases:
    """A member acknowledges by entries and samples, and returns what it does not acknowledge."""

    @pytest.fixture
    def held(self, scene: Claims) -> tuple[LeaseClaim, Lease]:
        """Return a claim, and its lease of the first entry."""
        claim = scene.member()
        claim.join("resume")
        (entry_id,) = scene.deliver("m", 1)
        claim.leases.add(lease := Lease(0, 0, 0, entry_id, unacknowledged=BLOCK))
        return claim, lease

    def done(self, claim: LeaseClaim) -> list[bool]:
        """Return which samples of the entry are acknowledged."""
        bits: list[bool] = done_bits(claim.client, claim.stream.partitions[0], 0, "g", 0, 0, BLOCK).tolist()
        return bits

    def pending(self, claim: LeaseClaim) -> set[str]:
        """Return who holds entries of the epoch."""
        return set(pending_members(claim.client, [(claim.stream.partitions[0], 0)], "g"))

    def test_a_batch_that_was_trained_on_is_acknowledged(
        self, held: tuple[LeaseClaim, Lease], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The entry goes with its last sample. What was trained on is compared with a server that is replaced."""
        claim, lease = held
        noted = list[Any]()
        monkeypatch.setattr(LossDetector, "acknowledged", lambda _, __, entries: noted.extend(entries))
        for lo, hi, members in ((0, 3, {"m"}), (3, BLOCK, set[str]())):
            claim.acknowledge(Batch({}, 0, [BatchSpan(lease, lo, hi)]))
            claim.flush()
            assert self.done(claim) == [offset < hi for offset in range(BLOCK)]
            assert self.pending(claim) == members
            assert claim.has_unacknowledged(0) is bool(members)
        assert claim.is_all_acknowledged()
        assert claim.is_all_acknowledged(claim.stream.partitions[0])
        assert noted == [(lease, 0, 3, 3), (lease, 3, BLOCK, 1)]

    def test_a_batch_of_an_epoch_that_was_released_is_not_sent(
        self, scene: Claims, held: tuple[LeaseClaim, Lease], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The epoch has nothing left to acknowledge, and its leases no longer count."""
        claim, lease = held
        sent = list[Any]()
        monkeypatch.setattr(Outboxes, "send", lambda *given: sent.append(given))
        scene.client.delete(claim.stream.keys.manifest(0))
        claim.acknowledge(Batch({}, 0, [BatchSpan(lease, 0, BLOCK)]))
        assert not claim.has_unacknowledged(0)
        assert sent == []

    def test_the_manifest_of_an_epoch_is_read_once_for_its_batches(
        self, scene: Claims, held: tuple[LeaseClaim, Lease], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be a round trip for each batch. An epoch that a server lost may come back as another one."""
        claim, lease = held
        looks = list[int]()

        def counted(client: Client, stream: Stream, epoch: int) -> Any:
            looks.append(epoch)
            return find_manifest(client, stream, epoch)

        monkeypatch.setattr(claims, "find_manifest", counted)
        batches = [Batch({}, 0, [BatchSpan(lease, at, at + 1)]) for at in range(BLOCK)]
        for batch in batches[:2]:
            claim.acknowledge(batch)
        assert looks == [0]
        claim.forget(0)
        claim.acknowledge(batches[2])
        assert looks == [0, 0]
        abandon_epoch(scene.client, claim.stream, 0)
        claim.close_epochs(0)
        looks.clear()
        claim.acknowledge(batches[0])
        assert looks == [0], "nothing is kept of an epoch that is over"

    def test_what_is_returned_is_claimed_again_less_what_the_loop_keeps(self, held: tuple[LeaseClaim, Lease]) -> None:
        """A part may wait for its checkpoint. Delivered again, it would be trained on twice."""
        claim, lease = held
        lost = Lease(0, 0, 0, b"9-9", unacknowledged=BLOCK)
        returned = Batch({}, 0, [BatchSpan(lease, 0, 2), BatchSpan(lost, BLOCK, 2 * BLOCK)])
        assert not claim.return_batches([returned], [Batch({}, 0, [BatchSpan(lease, 2, BLOCK)])])
        assert list(claim.heartbeat.claims) == [ClaimedEntry(0, 0, lease.entry_id)]
        assert claim.leases.ids(0) == {0: [lease.entry_id]}
        assert claim.leases.kept(0, 0, 0) == [(2, BLOCK)]
        assert [claim.take_returned(), claim.take_returned()] == [{0}, set()]

    @pytest.mark.parametrize("is_known", [False, True])
    def test_an_entry_without_a_sample_left_is_acknowledged_alone(
        self, held: tuple[LeaseClaim, Lease], is_known: bool
    ) -> None:
        """A server may have lost the bits that others set, and the lease knows them."""
        claim, lease = held
        lease.acknowledge([(0, BLOCK)], 0)
        manifest = load_manifest(claim.client, claim.stream, 0)
        claim.end_entry(manifest, claim.stream.partitions[0], lease.entry_id, lease if is_known else None)
        assert self.done(claim) == [is_known] * BLOCK
        assert self.pending(claim) == set()
        assert not claim.has_unacknowledged(0)

    def test_a_member_that_leaves_returns_what_it_holds(
        self, scene: Claims, held: tuple[LeaseClaim, Lease], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others get it at once. Before that, its acknowledgements are sent, and losses of a server are reported."""
        claim, lease = held
        checked = list[str]()
        monkeypatch.setattr(LossDetector, "check", lambda _: checked.append("losses"))
        scene.deliver("m", 1)
        claim.acknowledge(Batch({}, 0, [BatchSpan(lease, 0, 2)]))
        claim.leave()
        assert self.done(claim) == [True, True, False, False]
        assert self.pending(claim) == {RELEASED, "m"}, "the second entry never arrived"
        assert ("g", "m") not in load_roster(scene.client, claim.stream.partitions[0]).members
        assert checked == ["losses"]

    def test_what_a_member_holds_is_told_in_bytes(self, held: tuple[LeaseClaim, Lease]) -> None:
        """A writer that waits for quota learns who holds it up. A claimed entry is of no shard until it is fetched."""
        claim, _ = held
        (partition,) = claim.stream.partitions
        assert claim._held_bytes(partition) == BLOCK * SAMPLE_BYTES
        claim.leases.add(Lease(0, 0, -1, b"1-1", unacknowledged=1))
        ids = [entry_id for entry_id, _ in claim.client.xrange(partition.entries(0))]
        for entry_id, shard in ((ids[1], 0), (ids[-1], 1)):
            claim.leases.add(Lease(0, 0, shard, entry_id, unacknowledged=1))
        assert claim._held_bytes(partition) == 3 * BLOCK * SAMPLE_BYTES


class TestPositions:
    """A rank acknowledges by position, and goes back by position."""

    @pytest.fixture
    def rank(self, scene: Claims) -> RankClaim:
        """Return the first of two ranks."""
        rank = scene.rank()
        rank.join("resume")
        return rank

    def test_a_rank_reads_on_where_it_stands_and_once_again_what_was_returned(self, rank: RankClaim) -> None:
        """A batch that a framework pulled and gave back is read again, and with it all behind it."""
        batches = [Batch({}, 0, [], position) for position in (STEP, 2 * STEP, 3 * STEP)]
        rank.acknowledge(batches[0])
        rank.flush()
        assert (rank.position(0), rank.start_of(0)) == (STEP, STEP)
        assert [rank.step_of(batch) for batch in batches] == [0, STEP, 2 * STEP]
        assert not rank.return_batches([], batches)
        rank.ended(0, COUNT, COUNT)
        rank.unclosed.add(0)
        assert rank.return_batches([batches[2], batches[1]], [])
        assert rank.start_of(0) == STEP
        rank.return_batches([batches[2]], [])
        assert rank.start_of(0) == STEP, "the first of all that were returned"
        assert rank.take_returned() == {0}
        assert rank.take_returned() == set()
        assert rank.unclosed == set()
        assert rank.is_end(0, 0), "its end is forgotten"
        assert [rank.take_start(0), rank.take_start(0), rank.take_start(1)] == [STEP, STEP, 0]

    def test_what_is_outstanding_of_an_epoch_that_was_read_is_known(self, rank: RankClaim) -> None:
        """It closes with the last acknowledgement."""
        assert rank.is_end(0, 0)
        assert not rank.has_unacknowledged(0)
        rank.ended(0, 2 * STEP, COUNT)
        assert not rank.is_end(0, 2 * STEP - 1)
        assert rank.is_end(0, 2 * STEP)
        for position, is_left in ((STEP, True), (2 * STEP, False), (STEP, False)):
            rank.acknowledge(Batch({}, 0, [], position))
            assert rank.has_unacknowledged(0) is is_left

    def test_a_rank_has_read_an_epoch_once_it_acknowledged_all_of_it(self, scene: Claims, rank: RankClaim) -> None:
        """It waits for the other ranks then, and not for samples."""
        manifest = load_manifest(scene.client, scene.stream, 0)
        for position, has_read in ((COUNT - 1, False), (COUNT, True)):
            report(scene.client, rank.who, manifest, position)
            assert rank.has_read(0) is has_read
        assert not rank.has_read(1)
        assert not rank.has_read(EPOCHS), "it has no manifest yet"

    @pytest.mark.parametrize(("remainder", "steps"), [("pad", 3), ("drop", 2), ("keep", 3)])
    def test_the_steps_of_an_epoch_are_known_with_its_size(
        self, any_url: str, any_client: Client, remainder: str, steps: int
    ) -> None:
        """A progress bar shows them, and ranks must agree on them."""
        with planned_writer(any_url) as writer, ExitStack() as stack:
            writer.epoch(sizes=[5, 4])
            rank = Claims(any_client, stack).rank()
            assert rank.steps(0, remainder) == steps
            assert rank.steps(1, remainder) is None
            writer.epoch()
            assert rank.steps(1, remainder) is None

    def test_going_back_moves_later_epochs_to_their_start_and_earlier_ones_to_their_end(
        self, scene: Claims, rank: RankClaim
    ) -> None:
        """A model that was restored from a checkpoint has seen the earlier ones, and none of the later."""
        for epoch, position in ((0, STEP), (1, 2 * STEP), (2, COUNT), (3, STEP)):
            rank.acknowledge(Batch({}, epoch, [], position))
        rank.ended(2, COUNT, COUNT)
        rank.return_batches([Batch({}, 2, [], 3 * STEP)], [])
        abandon_epoch(scene.client, scene.stream, 3)
        rank.rewind(1, STEP)
        at = {epoch: known_positions(scene.client, scene.stream, epoch, "ranks").of(0) for epoch in range(4)}
        assert at == {0: COUNT, 1: STEP, 2: 0, 3: STEP}
        assert rank.unclosed == {0}
        assert rank.first == 0
        assert [rank.start_of(epoch) for epoch in (1, 2)] == [STEP, 0]
        assert rank.is_end(2, 0)
        for epoch in (1, 2):
            rank.ended(epoch, COUNT, COUNT)
            assert rank.has_unacknowledged(epoch)

    def test_going_back_passes_over_epochs_that_were_given_up_or_have_no_size(
        self, scene: Claims, rank: RankClaim
    ) -> None:
        """No sample of the first kind is read again, and the second kind has no end that could be acknowledged."""
        manifest = scene.stream.keys.manifest(0)
        scene.client.hset(manifest, "state", "open")
        scene.client.hdel(manifest, "sizes", "shards")
        for epoch in (1, 2, 3):
            rank.acknowledge(Batch({}, epoch, [], STEP))
        abandon_epoch(scene.client, scene.stream, 2)
        rank.rewind(1, 0)
        assert [rank.position(epoch) for epoch in range(EPOCHS)] == [0, 0, STEP, 0]
        assert rank.unclosed == set()

    def test_a_report_from_before_does_not_undo_going_back(
        self, rank: RankClaim, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reports are sent again to a server that may have lost them."""
        done = list[str]()
        monkeypatch.setattr(Outboxes, "flush", lambda _: done.append("flush"))
        monkeypatch.setattr(Outboxes, "forget", lambda _: done.append("forget"))
        monkeypatch.setattr(claims, "rewind", lambda *_: done.append("rewind"))
        rank.return_batches([Batch({}, 0, [], STEP)], [])
        report(rank.client, rank.who, load_manifest(rank.client, rank.stream, 0), STEP)
        rank.rewind(0, 0)
        assert done == ["flush", "forget", "rewind"]

    def test_what_a_server_lost_of_an_epoch_is_not_remembered(
        self, rank: RankClaim, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may come back with less, and the rank has to reach its end again."""
        rank.acknowledge(Batch({}, 0, [], COUNT))
        rank.flush()
        rank.ended(0, COUNT, COUNT)
        rank.client.delete(rank.stream.partitions[0].positions(0, "ranks"))
        assert not rank.has_unacknowledged(0)
        rank.forget(0)
        assert rank.has_unacknowledged(0)
        sent = list[Any]()
        monkeypatch.setattr(Outboxes, "send", lambda *given: sent.append(given))
        rank.client.delete(rank.stream.keys.manifest(0))
        rank.acknowledge(Batch({}, 0, [], COUNT))
        assert sent == [], "its manifest is gone"

    def test_a_group_that_goes_back_before_its_first_epoch_reads_from_there(self, rank: RankClaim) -> None:
        """It had begun later, and a checkpoint may be older."""
        rank.first = 3
        rank.rewind(1, 0)
        assert rank.first == 1
        rank.rewind(2, 0)
        assert rank.first == 1

    def test_entries_that_are_known_are_compared_after_a_failover_and_else_the_position(
        self, rank: RankClaim, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker process sends rows without their entries, and losses of both are reported."""
        noted = list[Any]()
        monkeypatch.setattr(LossDetector, "acknowledged", lambda _, manifest, entries: noted.append(len(entries)))
        monkeypatch.setattr(LossDetector, "reached", lambda _, manifest, position: noted.append(f"to {position}"))
        known, unknown = (Lease(0, 0, 0, entry_id, unacknowledged=BLOCK) for entry_id in (b"1-0", b""))
        for leases in ([known], [known, unknown], [unknown]):
            rank.acknowledge(Batch({}, 0, [BatchSpan(lease, 0, 1) for lease in leases], STEP))
        assert noted == [1, f"to {STEP}", f"to {STEP}"]

    def test_ranks_that_never_came_are_named(self, scene: Claims) -> None:
        """Their share of the epoch waits for them, and world_size may be a mistake."""
        ranks = [scene.rank(number, 4) for number in range(2)]
        for rank in ranks:
            rank.join("resume")
        ranks[0].tell_absent(0)
        ranks[0].tell_absent(1)
        assert len(scene.said) == 1
        assert "epoch 0 ended here, and ranks 2, 3 of the 4 ranks of group 'ranks' did not come: 2/4" in scene.said[0]
        assert "and rank 3 of the 4 ranks" in absent_notice(ranks[0].who, 0, [3])


def test_what_a_rank_holds_is_told_in_bytes(scene: Claims) -> None:
    """A writer that waits for quota learns who holds it up."""
    rank, other = scene.rank(), scene.rank(1)
    for one in (rank, other):
        one.join("resume")
    (partition,) = scene.stream.partitions
    assert rank._held_bytes(partition) == EPOCHS * COUNT * SAMPLE_BYTES
    for one, held in ((rank, EPOCHS * COUNT), (other, EPOCHS * COUNT - 2 * BLOCK)):
        one.acknowledge(Batch({}, 0, [], 2 * BLOCK))
        one.flush()
        assert rank._held_bytes(partition) == held * SAMPLE_BYTES
    drop_group(scene.client, scene.stream, "ranks")
    assert rank._held_bytes(partition) == 0
    join_group(scene.client, rank.who, first=EPOCHS - 1)
    assert rank._held_bytes(partition) == COUNT * SAMPLE_BYTES, "it does not read the others"


def test_a_rank_before_the_slowest_one_holds_up_no_writer(scene: Claims) -> None:
    """It would be told to acknowledge, and could not free a byte."""
    rank, other = scene.rank(), scene.rank(1)
    for one in (rank, other):
        one.join("resume")
    (partition,) = scene.stream.partitions
    scene.client.hset(scene.stream.keys.manifest(3), "state", "open")
    note_wait(
        scene.client, partition, 3, 0, waited_s=9, need_bytes=1, held_bytes=1, why="budget", is_next=True
    )  # fmt: skip
    (blocked,) = rank.blocked_partitions(together=False)
    assert (blocked.mine_bytes, blocked.has_others) == (EPOCHS * COUNT * SAMPLE_BYTES, False)
    rank.acknowledge(Batch({}, 1, [], STEP))
    rank.flush()
    (blocked,) = rank.blocked_partitions(together=False)
    assert (blocked.mine_bytes, blocked.has_others) == (0, True)
    (blocked,) = other.blocked_partitions(together=False)
    assert (blocked.mine_bytes, blocked.has_others) == (EPOCHS * COUNT * SAMPLE_BYTES, False)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_member_of_several_servers_has_a_heartbeat_for_each_and_speaks_with_one_voice(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
) -> None:
    """A silent server must not cost the leases on another one, and the loop has one rate and one wait."""
    plan(any_url, [COUNT] * 3, partitions=3)
    monkeypatch.setattr(type(any_client), "by_server", lambda *_: [[0], [1, 2]])
    with ExitStack() as stack:
        scene = Claims(any_client, stack)
        claim: LeaseClaim | RankClaim = scene.rank() if is_ordered else scene.member()
        first, second = claim.heartbeat._each
        assert [[one.number for one in each.partitions] for each in (first, second)] == [[0], [1, 2]]
        assert first.loop is second.loop is claim.heartbeat.loop
        assert (first._leads, second._leads) == (True, False)
        assert (first._loss_detector is None, second._loss_detector is None) == (False, True)
        if isinstance(claim, LeaseClaim):
            assert claim.heartbeat.claims is claim.heartbeat._each[1].claims
