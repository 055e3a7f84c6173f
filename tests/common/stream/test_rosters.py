"""Rosters on a real server: who joins where, what a heartbeat says, and how a roster gets back what it lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from penstock_common.errors import (
    EpochNotFound,
    EpochsReleased,
    GroupNotFound,
    MemberReplaced,
    ReplayTruncated,
    StreamNotFound,
)
from penstock_common.stream.commands import Client
from penstock_common.stream.groups import roster
from penstock_common.stream.groups.roster import (
    REJOIN_LOOK_S,
    GroupRecord,
    IdleReport,
    Membership,
    RankOrder,
    Rejoining,
    WaitingWriter,
    beat,
    beat_each,
    close_for_group,
    end_replay,
    end_wait,
    expire_silent,
    find_silent,
    hold_for_replay,
    join_group,
    known_groups,
    leave,
    load_roster,
    note_wait,
    pin_epoch,
    rejoin,
    reopen_for_group,
    require_group,
    restore_group,
    unpin_epoch,
)
from penstock_common.stream.streams import Stream
from tests.contracts.feed import SPEC, writer_of
from tests.torn_slots import partition_slot


def planned(url: str, partitions: int = 2, epochs: int = 1) -> Stream:
    """Return a stream with planned epochs and no samples."""
    with writer_of(url, spec=SPEC, partitions=partitions) as writer:
        for _ in range(epochs):
            writer.epoch(sizes=[8] * partitions)
        return writer.stream


def group_at(client: Client, stream: Stream, number: int, group: str = "g") -> GroupRecord:
    """Return the group as a partition knows it."""
    return load_roster(client, stream.partitions[number]).groups[group]


class TestJoining:
    """A group reads the same epochs in every partition."""

    def test_a_group_begins_at_the_first_epoch_that_is_whole_everywhere(self, any_url: str, any_client: Client) -> None:
        """An epoch that is trimmed in one partition would have a hole. A later start changes nothing afterwards."""
        stream = planned(any_url, epochs=3)
        who = Membership(stream, "g", "m", "i")
        assert join_group(any_client, replace(who, group="early")) == 0
        any_client.hset(stream.partitions[1].roster, "t:0", "1")
        assert join_group(any_client, who) == 1
        assert join_group(any_client, who, first=2) == 1
        assert [group_at(any_client, stream, number).first for number in (0, 1)] == [1, 1]
        assert join_group(any_client, replace(who, group="late"), first=2) == 2
        records = [group_at(any_client, stream, 0, group) for group in ("early", "late")]
        assert [(record.declared, record.holds, record.world) for record in records] == [(False, True, 0)] * 2

    def test_a_group_that_lost_epochs_joins_only_by_force(self, any_url: str, any_client: Client) -> None:
        """Its training would pass over samples without a word."""
        stream = planned(any_url, partitions=1)
        who, key = Membership(stream, "g", "m", "i"), stream.partitions[0].roster
        join_group(any_client, who)
        any_client.hset(key, "g:g", json.dumps(json.loads(any_client.hget(key, "g:g")) | {"lost": [0, 3]}))
        assert group_at(any_client, stream, 0).lost == (0, 3)
        with pytest.raises(EpochsReleased, match=r"group 'g' had stopped holding data and epochs 0-3 of 't'"):
            join_group(any_client, who)
        join_group(any_client, who, force=True)
        assert group_at(any_client, stream, 0).lost is None

    def test_a_declaration_keeps_the_ranks_of_an_ordered_group(self, any_url: str, any_client: Client) -> None:
        """A declaration knows neither the group's kind nor its batches."""
        stream = planned(any_url)
        join_group(any_client, Membership(stream, "g", "rank-0", "i", RankOrder(0, 2, 8)))
        join_group(any_client, Membership(stream, "g", "", ""), declared=True)
        for number in (0, 1):
            record = group_at(any_client, stream, number)
            assert (record.kind, record.world, record.batch, record.declared) == ("ordered", 2, 8, True)

    def test_a_stream_that_was_deleted_meanwhile_is_not_joined(self, any_url: str, any_client: Client) -> None:
        """A roster of a stream that does not exist would stay for ever."""
        stream = planned(any_url)
        any_client.flushall()
        with pytest.raises(StreamNotFound):
            join_group(any_client, Membership(stream, "g", "m", "i"))
        assert any_client.keys("*") == []

    def test_groups_are_known_by_any_roster_and_required_by_name(self, any_url: str, any_client: Client) -> None:
        """A server that came back older may have lost some."""
        stream = planned(any_url)
        for group in ("train", "eval"):
            join_group(any_client, Membership(stream, group, "", ""))
        assert require_group(any_client, stream, "train") == group_at(any_client, stream, 0, "train")
        with pytest.raises(GroupNotFound, match=r"'t' has no group 'trian'; groups there: eval, train.*train"):
            require_group(any_client, stream, "trian")
        any_client.hdel(stream.partitions[0].roster, "g:train")
        any_client.hdel(stream.partitions[1].roster, "g:eval")
        assert known_groups(any_client, stream) == ["eval", "train"]
        any_client.hdel(stream.partitions[0].roster, "g:eval")
        with pytest.raises(GroupNotFound, match="groups there: none"):
            require_group(any_client, stream, "train")

    def test_a_group_closes_an_epoch_in_every_partition(self, any_url: str, any_client: Client) -> None:
        """One that kept it open would hold its data for ever."""
        stream = planned(any_url)
        join_group(any_client, Membership(stream, "g", "", ""))
        for change, closed in ((close_for_group, {("g", 0)}), (reopen_for_group, set())):
            change(any_client, stream, "g", 0)
            assert [load_roster(any_client, one).closed for one in stream.partitions] == [closed] * 2


class TestHeartbeats:
    """A heartbeat renews the member, its group and its entries, and says whether its loop waits."""

    def test_a_member_says_for_how_long_its_loop_waits(self, any_url: str, any_client: Client) -> None:
        """Others find by it that all readers wait for each other."""
        stream = planned(any_url)
        first, second = stream.partitions
        who = Membership(stream, "g", "m", "i")
        join_group(any_client, who)
        beat(any_client, who, first, {})
        beat_each(any_client, who, [(second, {})])
        assert [load_roster(any_client, one).idle for one in (first, second)] == [{}, {}]
        for idle_ms, more in ((0, {}), (5000, {"handed_bytes": 7})):
            beat(any_client, who, first, {}, idle_ms=idle_ms, **more)
            beat_each(any_client, who, [(second, {})], idle_ms=idle_ms, **more)
            for partition in stream.partitions:
                found = load_roster(any_client, partition)
                seen_ms = found.members["g", "m"]
                assert found.idle["g", "m"] == IdleReport(seen_ms - idle_ms, more.get("handed_bytes", 0))

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_partition_that_refuses_a_heartbeat_says_why(self, any_url: str, any_client: Client, number: int) -> None:
        """The process ends by it, and its user must know which other one has the name, or that the group is gone."""
        stream = planned(any_url)
        who = Membership(stream, "g", "m", "i")
        join_group(any_client, who)
        held: list[tuple[Any, dict[int, list[bytes]]]] = [(partition, {0: [b"1-0"]}) for partition in stream.partitions]
        assert beat_each(any_client, who, held) == [{0: [b"1-0"]}] * 2, "no entry is held"
        assert beat(any_client, who, *held[number]) == {0: [b"1-0"]}
        key = stream.partitions[number].roster
        any_client.hset(key, "m:g:m", json.dumps({"inc": "another", "seen": 0}))
        with pytest.raises(MemberReplaced, match="another process joined group 'g' as member 'm'"):
            beat_each(any_client, who, held)
        any_client.hdel(key, "g:g")
        with pytest.raises(GroupNotFound, match=r"group 'g', or its member 'm', is no longer on the roster of 't'"):
            beat_each(any_client, who, held)

    def test_a_heartbeat_that_is_refused_for_another_reason_raises_that(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be counted as given, and the lease would end."""

        def refuse(*_: object) -> None:
            raise ResponseError("NOPERM this user has no permissions")

        stream = planned(any_url)
        monkeypatch.setattr(roster, "run_scripts", refuse)
        with pytest.raises(ResponseError, match="NOPERM"):
            beat(any_client, Membership(stream, "g", "m", "i"), stream.partitions[0], {})

    def test_a_heartbeat_to_a_stream_that_was_deleted_says_so(self, any_url: str, any_client: Client) -> None:
        """'The group was dropped' would send its user to look for a drop that never happened."""
        stream = planned(any_url)
        who = Membership(stream, "g", "m", "i")
        join_group(any_client, who)
        any_client.flushall()
        with pytest.raises(StreamNotFound):
            beat(any_client, who, stream.partitions[0], {})

    def test_a_member_that_leaves_takes_its_consumer_along(self, any_url: str, any_client: Client) -> None:
        """Each run of a job has another name, and its consumers would add up."""
        stream = planned(any_url, partitions=1)
        (partition,), who = stream.partitions, Membership(stream, "g", "m", "i")
        join_group(any_client, who)
        any_client.xadd(partition.entries(0), {"x": "1"}, id="1-0")
        any_client.xreadgroup("g", "m", {partition.entries(0): ">"})
        assert not leave(any_client, replace(who, incarnation="another"), partition, {0: [b"1-0"]})
        assert leave(any_client, who, partition, {0: [b"1-0"]})
        assert [one["name"] for one in any_client.xinfo_consumers(partition.entries(0), "g")] == [b"~released"]
        assert not leave(any_client, who, partition, {})

    @pytest.mark.parametrize(("silent_ms", "is_looked_at"), [(10_000, True), (10_001, False)])
    def test_nobody_is_silent_for_longer_than_the_server_is_up(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, silent_ms: int, *, is_looked_at: bool
    ) -> None:
        """A server that was down saw no heartbeats, and its members live."""
        stream = planned(any_url, partitions=1)
        (partition,) = stream.partitions
        join_group(any_client, Membership(stream, "g", "m", "i"))
        for field, value in (("m:g:m", {"inc": "i", "seen": 0}), ("g:g", {**SHARED_GROUP, "seen": 0})):
            any_client.hset(partition.roster, field, json.dumps(value))
        monkeypatch.setattr(any_client, "info", lambda *_, **__: {"uptime_in_seconds": 10})
        assert expire_silent(any_client, partition, silent_ms) == (["g"] if is_looked_at else [])
        assert bool(load_roster(any_client, partition).members) != is_looked_at

    def test_a_member_that_was_renewed_since_the_first_look_stays(self, any_url: str, any_client: Client) -> None:
        """The server's clock may have jumped, and only a silent process has the same record twice."""
        (partition,) = (stream := planned(any_url, partitions=1)).partitions
        for member in ("silent", "alive"):
            join_group(any_client, Membership(stream, "g", member, "i"))
        looked = find_silent(partition, any_client.hgetall(partition.roster), 1 << 50)
        any_client.hset(partition.roster, "m:g:alive", json.dumps({"inc": "i", "seen": 0}))
        assert expire_silent(any_client, partition, -1000, {}) == []
        assert len(load_roster(any_client, partition).members) == 2
        assert expire_silent(any_client, partition, -1000, looked) == ["g"]
        assert list(load_roster(any_client, partition).members) == [("g", "alive")]


SHARED_GROUP = {"kind": "shared", "first": 0, "declared": False, "holds": True}


class TestRejoining:
    """A roster that lost a member gets it back, with all that the others know of its group."""

    @pytest.mark.parametrize(
        "record",
        [
            GroupRecord(1, declared=True, holds=True, seen_ms=0, read=-1, lost=None),
            GroupRecord(0, declared=False, holds=False, seen_ms=0, read=0, lost=(2, 3)),
            GroupRecord(0, declared=False, holds=True, seen_ms=0, read=4, lost=None, kind="ordered", world=3, batch=8),
        ],
    )
    def test_a_group_comes_back_as_another_roster_has_it(
        self, any_url: str, any_client: Client, record: GroupRecord
    ) -> None:
        """Each of its fields decides what it reads, or what is kept for it."""
        stream = planned(any_url, epochs=2)
        partition = stream.partitions[1]
        assert restore_group(any_client, partition, "g", record, {1})
        found = load_roster(any_client, partition)
        assert replace(found.groups["g"], seen_ms=0) == record
        assert found.closed == {("g", 1)}
        assert found.members == {}

    def test_a_process_that_took_the_name_meanwhile_keeps_it(self, any_url: str, any_client: Client) -> None:
        """Both would read as one member."""
        stream = planned(any_url)
        partition, record = stream.partitions[1], GroupRecord(0, False, True, 0, -1, None)
        assert restore_group(any_client, partition, "g", record, (), "m", "mine")
        assert load_roster(any_client, partition).incarnations == {("g", "m"): "mine"}
        assert not restore_group(any_client, partition, "g", record, (), "m", "other")
        before = any_client.hget(partition.roster, "m:g:m")
        assert restore_group(any_client, partition, "g", record, (), "m", "other", before)
        assert load_roster(any_client, partition).incarnations == {("g", "m"): "other"}

    def test_a_member_waits_between_two_looks_and_is_back(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One who drops the group is through with all rosters at the second look."""
        monkeypatch.setattr(roster, "REJOIN_SETTLE_S", 0.0)
        stream, slept = planned(any_url), list[float]()
        who, before = Membership(stream, "g", "m", "i"), partition_slot(any_client, stream, 1)
        join_group(any_client, who)
        before.restore(any_client)
        assert rejoin(any_client, who, stream.partitions[1], sleep=slept.append)
        assert slept == [REJOIN_LOOK_S]
        assert Rejoining(any_client, who, lambda: 0.0).is_back(stream.partitions[1]), "another thread was first"
        beat(any_client, who, stream.partitions[1], {})

    def test_a_member_whose_group_was_dropped_does_not_come_back(self, any_url: str, any_client: Client) -> None:
        """It ends at once. So does one that its only server forgot, unless that is known to be another run."""
        stream, slept = planned(any_url, partitions=1), list[float]()
        who, (partition,) = Membership(stream, "g", "m", "i"), stream.partitions
        assert not rejoin(any_client, who, partition, lambda _: True, sleep=slept.append)
        join_group(any_client, Membership(stream, "g", "", ""), declared=True)
        assert not rejoin(any_client, who, partition, sleep=slept.append)
        assert Rejoining(any_client, who).is_back(partition) is False
        assert slept == []

    def test_a_member_that_its_only_server_forgot_comes_back_to_its_group(
        self, any_url: str, any_client: Client
    ) -> None:
        """The server is known to be another run, so the member may be missing without having been dropped."""
        stream, now_s = planned(any_url, partitions=1), [0.0]
        who, (partition,) = Membership(stream, "g", "m", "i"), stream.partitions
        join_group(any_client, Membership(stream, "g", "", ""), declared=True)
        rejoining = Rejoining(any_client, who, lambda: now_s[0], lambda _: True)
        assert rejoining.is_back(partition) is None
        now_s[0] = roster.REJOIN_SETTLE_S
        assert rejoining.is_back(partition)
        beat(any_client, who, partition, {})

    def test_a_roster_gets_the_group_of_the_lowest_partition(self, any_url: str, any_client: Client) -> None:
        """All members of a group take the same one, whichever of them is first."""
        stream, now_s = planned(any_url, partitions=4), [0.0]
        who, before = Membership(stream, "g", "m", "i"), partition_slot(any_client, stream, 3)
        join_group(any_client, who)
        before.restore(any_client)
        for number, read in ((0, 5), (1, 6), (2, 7)):
            key = stream.partitions[number].roster
            any_client.hset(key, "g:g", json.dumps(json.loads(any_client.hget(key, "g:g")) | {"read": read}))
        rejoining = Rejoining(any_client, who, lambda: now_s[0])
        assert rejoining.is_back(stream.partitions[3]) is None
        now_s[0] = roster.REJOIN_SETTLE_S
        assert rejoining.is_back(stream.partitions[3])
        assert group_at(any_client, stream, 3).read == 5

    def test_what_a_roster_still_has_of_a_group_stays(self, any_url: str, any_client: Client) -> None:
        """Another roster's first epoch would pass over epochs that are kept here. From now on it holds data again."""
        stream, now_s = planned(any_url, epochs=2), [0.0]
        who = Membership(stream, "g", "m", "i")
        first, second = (partition.roster for partition in stream.partitions)
        join_group(any_client, who)
        for key, more in ((first, {"first": 1}), (second, {"holds": False})):
            any_client.hset(key, "g:g", json.dumps(json.loads(any_client.hget(key, "g:g")) | more))
        any_client.hdel(second, "m:g:m")
        rejoining = Rejoining(any_client, who, lambda: now_s[0])
        assert rejoining.is_back(stream.partitions[1]) is None
        now_s[0] = roster.REJOIN_SETTLE_S
        assert rejoining.is_back(stream.partitions[1])
        record = group_at(any_client, stream, 1)
        assert (record.first, record.declared, record.holds) == (0, False, True)

    @pytest.mark.parametrize("first_end", [True, False])
    def test_a_roster_that_loses_a_member_again_is_looked_at_twice_again(
        self, any_url: str, any_client: Client, *, first_end: bool
    ) -> None:
        """The first look was long ago, so it says nothing of who drops the group now."""
        stream, now_s = planned(any_url), [0.0]
        who, before = Membership(stream, "g", "m", "i"), partition_slot(any_client, stream, 1)
        first, second = stream.partitions
        join_group(any_client, who)
        before.restore(any_client)
        rejoining = Rejoining(any_client, who, lambda: now_s[0])
        assert rejoining.is_back(second) is None
        now_s[0] = 100.0
        if not first_end:
            any_client.hdel(first.roster, "g:g")
        assert rejoining.is_back(second) is first_end
        join_group(any_client, who)
        before.restore(any_client)
        now_s[0] = 200.0
        assert rejoining.is_back(second) is None

    def test_a_roster_of_another_number_of_ranks_takes_the_new_one_and_keeps_the_rest(
        self, any_url: str, any_client: Client
    ) -> None:
        """Its server is another run, and none of the ranks that it names lives."""
        stream, now_s = planned(any_url, epochs=2), [0.0]
        older, newer = (Membership(stream, "g", "rank-0", str(world), RankOrder(0, world, 4)) for world in (1, 2))
        join_group(any_client, older)
        before, partition = partition_slot(any_client, stream, 1), stream.partitions[1]
        join_group(any_client, newer, quiet_ms=0)
        before.restore(any_client)
        for one, field, more in (
            (stream.partitions[0], "g:g", {"first": 1}),
            (partition, "g:g", {"lost": [0, 0], "holds": False}),
            (partition, "m:g:rank-0", {"seen": 0}),
        ):
            any_client.hset(one.roster, field, json.dumps(json.loads(any_client.hget(one.roster, field)) | more))
        rejoining = Rejoining(any_client, newer, lambda: now_s[0], lambda _: True)
        assert rejoining.is_back(partition) is None
        now_s[0] = roster.REJOIN_QUIET_S
        assert rejoining.is_back(partition)
        record = replace(group_at(any_client, stream, 1), seen_ms=0)
        assert record == GroupRecord(0, False, True, 0, -1, None, kind="ordered", world=2, batch=4)
        beat(any_client, newer, partition, {})

    @pytest.mark.parametrize(("number", "answer"), [(0, False), (1, None), (2, None)])
    def test_of_two_processes_that_live_the_one_that_a_lower_partition_names_goes_on(
        self, any_url: str, any_client: Client, number: int, answer: bool | None
    ) -> None:
        """Both would end, or both would read the same samples."""
        stream, now_s = planned(any_url, partitions=3), [0.0]
        older, newer = (Membership(stream, "g", "m", one) for one in ("older", "newer"))
        join_group(any_client, older)
        partition, before = stream.partitions[number], partition_slot(any_client, stream, number)
        join_group(any_client, newer, quiet_ms=0)
        before.restore(any_client)
        any_client.hset(partition.roster, "m:g:m", json.dumps({"inc": "older", "seen": 0}))
        rejoining = Rejoining(any_client, newer, lambda: now_s[0])
        assert rejoining.is_back(partition) is None
        now_s[0] = roster.REJOIN_QUIET_S
        beat(any_client, older, partition, {})
        assert rejoining.is_back(partition) is answer
        assert load_roster(any_client, partition).incarnations == {("g", "m"): "older"}

    def test_ranks_of_another_number_keep_a_roster_of_a_server_that_went_on(
        self, any_url: str, any_client: Client
    ) -> None:
        """They joined later than this one, which ends."""
        stream = planned(any_url)
        older, newer = (Membership(stream, "g", "rank-0", str(world), RankOrder(0, world, 4)) for world in (1, 2))
        join_group(any_client, older)
        before = partition_slot(any_client, stream, 1)
        join_group(any_client, newer, quiet_ms=0)
        before.restore(any_client)
        assert Rejoining(any_client, newer).is_back(stream.partitions[1]) is False
        assert group_at(any_client, stream, 1).world == 1


class TestNotes:
    """Rosters note waiting writers, pinned epochs and replays."""

    def test_a_writer_that_waits_is_seen_until_it_goes_on(self, any_url: str, any_client: Client) -> None:
        """An operator needs to see since when the writer waits, and for how many bytes."""
        stream = planned(any_url, partitions=1)
        (partition,) = stream.partitions
        details: dict[str, Any] = {"need_bytes": 24, "held_bytes": 100, "why": "memory"}
        note_wait(any_client, partition, 0, 3, waited_s=2000.0, is_next=True, **details)
        note_wait(any_client, partition, 0, 5, waited_s=0.5, is_next=False, **details)
        found = load_roster(any_client, partition).waiting
        seen = {shard: note.seen_ms for (_, shard), note in found.items()}
        assert found == {
            (0, 3): WaitingWriter(seen[3] - 2_000_000, seen[3], 24, 100, "memory", is_next=True),
            (0, 5): WaitingWriter(seen[5] - 500, seen[5], 24, 100, "memory", is_next=False),
        }
        end_wait(any_client, partition, 0, 3)
        assert list(load_roster(any_client, partition).waiting) == [(0, 5)]

    def test_a_pin_is_in_all_partitions_or_in_none(self, any_url: str, any_client: Client) -> None:
        """Half a pin would promise a replay that cannot be read."""
        stream = planned(any_url, partitions=3)
        rosters = [partition.roster for partition in stream.partitions]

        def pinned() -> Sequence[bool]:
            return [0 in load_roster(any_client, partition).pinned for partition in stream.partitions]

        any_client.hset(rosters[1], "p:0", "1")
        any_client.hset(rosters[2], "t:0", "1")
        with pytest.raises(ReplayTruncated, match="epoch 0 of 't' is trimmed already"):
            pin_epoch(any_client, stream, 0)
        assert pinned() == [False, True, False], "what was pinned before stays"
        any_client.hdel(rosters[2], "t:0")
        any_client.hdel(rosters[2], "e:0")
        with pytest.raises(ReplayTruncated, match="epoch 0 of 't' is released already"):
            pin_epoch(any_client, stream, 0)
        any_client.hset(rosters[2], "e:0", "id")
        assert pin_epoch(any_client, stream, 0)
        assert pinned() == [True] * 3
        assert not pin_epoch(any_client, stream, 0)
        any_client.hdel(rosters[0], "p:0")
        any_client.hdel(rosters[1], "p:0")
        assert unpin_epoch(any_client, stream, 0)
        assert not unpin_epoch(any_client, stream, 0)
        for change in (pin_epoch, unpin_epoch):
            with pytest.raises(EpochNotFound):
                change(any_client, stream, 7)

    def test_a_replays_lease_is_taken_renewed_and_ended(self, any_url: str, any_client: Client) -> None:
        """An epoch is kept for it as long as it lasts."""
        (partition,) = planned(any_url, partitions=1).partitions
        assert not hold_for_replay(any_client, partition, "token", 0, 60_000, renew=True)
        assert hold_for_replay(any_client, partition, "token", 0, 60_000, renew=False)
        assert hold_for_replay(any_client, partition, "token", 0, 60_000, renew=True)
        assert list(load_roster(any_client, partition).replays) == ["token"]
        end_replay(any_client, partition, "token")
        assert load_roster(any_client, partition).replays == {}
