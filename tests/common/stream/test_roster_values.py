"""The meaning of a roster's fields and a group's positions, as pure values."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from redis.exceptions import ResponseError

from penstock_common.errors import GroupNotFound, MemberReplaced, PenstockError
from penstock_common.stream.groups.positions import (
    PositionReport,
    Positions,
    done_below,
    has_lost_place,
    kept_head,
    refusal_of,
    starts_of,
)
from penstock_common.stream.groups.roster import (
    STALE_MS,
    GroupRecord,
    IdleReport,
    Membership,
    RankOrder,
    Roster,
    WaitingWriter,
    find_silent,
    merge_rosters,
    parse_roster,
    parse_waiting,
    rank_member,
)
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest

PARTITION = PartitionKeys("t", "tag", 0)
NO_CLIENT: Any = None


def manifest_of(sizes: tuple[int, ...] | None, done: dict[int, int] | None = None, epoch: int = 0) -> Manifest:
    """Return an epoch of these shards."""
    state = "sized" if sizes is not None else "open"
    return Manifest(epoch, f"id{epoch}", state, "epoch", 0, "", sizes, done or {}, 0, None)


def group(**fields: Any) -> GroupRecord:
    """Return a shared group that holds data."""
    values = {"first": 0, "declared": False, "holds": True, "seen_ms": 0, "read": -1, "lost": None}
    return GroupRecord(**{**values, **fields})


def test_each_kind_of_field_is_read() -> None:
    """Every decision on retention and on members rests on it."""
    fields: dict[str, Any] = {
        "gen": "12", "bytes": "345", "retired": "0-2",
        "g:b": {"first": 1, "declared": 1, "holds": 0, "seen": 9, "read": 4, "lost": [2, 3], "kind": "shared"},
        "g:a": {"first": 2, "declared": 0, "holds": 1, "seen": 8, "kind": "ordered", "world": 4, "batch": 16},
        "m:a:rank-0": {"seen": 100, "inc": "x", "idle": 50, "handed": 7},
        "m:a:odd.name": {"seen": 101},
        "e:10": "id10", "e:9": "id9", "t:9": "1", "x:3": "id3", "d:a:9": "1", "d:odd.name:10": "1", "p:9": "1",
        "r:token": {"epoch": 9, "till": 77}, "b:9": "300", "b:10": "45",
    }  # fmt: skip
    reply = {name.encode(): (v if isinstance(v, str) else json.dumps(v)).encode() for name, v in fields.items()}
    roster = parse_roster(NO_CLIENT, PARTITION, reply)
    assert roster == Roster(
        generation="12",
        groups={
            "a": group(first=2, seen_ms=8, kind="ordered", world=4, batch=16),
            "b": group(first=1, declared=True, holds=False, seen_ms=9, read=4, lost=(2, 3)),
        },
        members={("a", "rank-0"): 100, ("a", "odd.name"): 101},
        incarnations={("a", "rank-0"): "x", ("a", "odd.name"): ""},
        idle={("a", "rank-0"): IdleReport(50, 7)},
        epochs={9: "id9", 10: "id10"},
        trimmed=frozenset({9}),
        retiring={3: "id3"},
        retired=((0, 2),),
        closed=frozenset({("a", 9), ("odd.name", 10)}),
        pinned=frozenset({9}),
        replays={"token": (9, 77)},
        epoch_bytes={9: 300, 10: 45},
        bytes=345,
    )
    assert (list(roster.epochs), list(roster.groups)) == ([9, 10], ["a", "b"])
    assert parse_roster(NO_CLIENT, PARTITION, {}) == Roster("0")


def test_a_group_owes_the_epochs_that_it_holds_reads_and_has_not_closed() -> None:
    """Retention deletes nothing of them."""
    roster = Roster(
        "1", {"owes": group(first=3), "later": group(first=4), "gone": group(holds=False), "done": group()},
        closed=frozenset({("done", 3), ("owes", 2)}),
    )  # fmt: skip
    assert list(roster.unacknowledged_by(3)) == ["owes"]
    assert list(roster.unacknowledged_by(2)) == ["done"]


def test_rosters_together_forget_no_group_and_close_only_what_all_have_closed() -> None:
    """A server that came back older knows less, and what another one still owes is deleted nowhere."""
    held, free = group(first=1), group(first=2, holds=False)
    one = Roster(
        "1", {"a": free, "b": held, "c": held}, epochs={0: "", 1: "", 2: ""}, pinned=frozenset({1}),
        closed=frozenset({("a", 0), ("a", 2), ("b", 0), ("b", 1), ("c", 1), ("c", 2)}), replays={"x": (0, 5)}, bytes=7,
    )  # fmt: skip
    other = Roster(
        "2", {"a": held, "b": free}, epochs={0: "", 1: ""}, pinned=frozenset({2}),
        closed=frozenset({("a", 0), ("b", 1)}), replays={"y": (1, 6)}, bytes=9,
    )  # fmt: skip
    merged = merge_rosters([one, other])
    assert merged.groups == {"a": held, "b": held, "c": held}
    assert merged.closed == {("a", 0), ("a", 2), ("b", 1), ("c", 1), ("c", 2)}
    assert merged.pinned == {1, 2}
    assert merged.replays == {"x": (0, 5), "y": (1, 6)}
    assert (merged.generation, merged.bytes, merged.epochs) == ("1", 7, one.epochs)


def test_a_note_of_a_waiting_writer_that_is_not_renewed_does_not_count() -> None:
    """Its writer died. Readers would be blamed for a budget that no writer waits for."""
    note = {"since": 5, "seen": 100, "need": 7, "held": 8, "why": "budget", "next": True}
    notes = {"9:3": json.dumps(note), "10:0": json.dumps(note | {"seen": 101, "next": False})}
    other = WaitingWriter(5, 101, 7, 8, "budget", is_next=False)
    assert parse_waiting(notes, 100 + STALE_MS) == {
        (9, 3): WaitingWriter(5, 100, 7, 8, "budget", is_next=True), (10, 0): other,
    }  # fmt: skip
    assert parse_waiting(notes, 101 + STALE_MS) == {(10, 0): other}


def test_a_membership_says_the_kind_of_its_group_if_it_knows_it() -> None:
    """A declaration alone is for a group of either kind."""
    stream: Any = None
    for member, order, kind in (
        ("", None, ""), ("m", None, "shared"), ("", RankOrder(0, 0, 0), "ordered"),
        (rank_member(3), RankOrder(3, 4, 8), "ordered"),
    ):  # fmt: skip
        assert Membership(stream, "g", member, "i", order).kind == kind
    assert rank_member(3) == "rank-3"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("PENSTOCK replaced", MemberReplaced, "another notebook or job uses this group by mistake, give"),
        ("PENSTOCK rank 3", MemberReplaced, "another number of ranks now: this one, 'rank-0', stops"),
        ("PENSTOCK gone", GroupNotFound, "'g' is no longer on the roster of 't': it was dropped"),
        ("NOPERM no permissions", None, ""),
    ],
)
def test_a_refused_report_is_told_in_words(text: str, kind: type[PenstockError] | None, words: str) -> None:
    """A refusal that another member may have caused is checked once more. Every other error is raised unchanged."""
    stream: Any = SimpleNamespace(name="t")
    who = Membership(stream, "g", rank_member(0), "i", RankOrder(0, 1, 8))
    error = ResponseError(text)
    assert has_lost_place(error) is (kind is not None)
    refusal = refusal_of(error, who)
    if kind is None:
        assert refusal is None
    else:
        assert type(refusal) is kind
        assert words in str(refusal)


@pytest.mark.parametrize(
    ("name", "value", "is_silent"),
    [
        ("m:g:a", {"seen": 99}, True),
        ("m:g:a", {"seen": 100}, False),
        ("o:g:a", {"seen": 99}, True),
        ("r:token", {"till": 99, "seen": 1000}, True),
        ("r:token", {"till": 100, "seen": 0}, False),
        ("g:g", {"first": 0, "kind": "shared", "declared": 0, "holds": 1, "seen": 99}, True),
        ("g:g", {"first": 0, "kind": "shared", "declared": 0, "holds": 1, "seen": 100}, False),
        ("g:g", {"first": 0, "kind": "shared", "declared": 1, "holds": 1, "seen": 99}, False),
        ("g:g", {"first": 0, "kind": "shared", "declared": 0, "holds": 0, "seen": 99}, False),
        ("e:1", {"seen": 0}, False),
    ],
)
def test_who_was_not_seen_since_a_time_is_silent(name: str, value: dict[str, Any], is_silent: bool) -> None:
    """A living member that expires loses its leases, and a dead one that stays holds data for ever."""
    reply = {b"e:0": b"id", name.encode(): json.dumps(value).encode()}
    found = find_silent(PARTITION, reply, 100)
    assert found == ({name.encode(): reply[name.encode()]} if is_silent else {})


def test_a_group_is_done_below_its_slowest_rank() -> None:
    """A rank that has reported nothing counts from the floor, so nothing that it needs is removed."""
    positions = Positions(4, {0: 16, 1: 8})
    assert [positions.of(rank) for rank in range(3)] == [16, 8, 4]
    assert [positions.minimum(world) for world in range(4)] == [4, 16, 8, 4]
    assert Positions().minimum(2) == 0
    assert kept_head(group(kind="ordered", world=3, batch=5)) == 30


def test_shards_begin_where_those_before_them_end() -> None:
    """In an open epoch a shard behind an unfinished one has no place yet."""
    for manifest, shards, starts in (
        (manifest_of((3, 0, 5)), range(4), {0: 0, 1: 3, 2: 3, 3: 8}),
        (manifest_of(None, {0: 3, 1: 4}), range(4), {0: 0, 1: 3, 2: 7}),
        (manifest_of(None, {1: 4}), range(2), {0: 0}),
        (manifest_of(None), range(0), {}),
    ):
        assert starts_of(manifest, shards) == starts
    for minimum, start, lo, hi, done in (
        (7, 3, 0, 6, [1, 1, 1, 1, 0, 0]),
        (7, 3, 3, 5, [1, 0]),
        (7, None, 3, 5, [0, 0]),
        (0, 0, 0, 2, [0, 0]),
    ):
        found = done_below(minimum, start, lo, hi)
        assert found.dtype == np.bool_
        assert found.tolist() == done


def test_reports_of_one_epoch_are_one_report_of_the_higher_position() -> None:
    """A position never falls, and one of another epoch says nothing of this."""
    who: Any = None
    for first, second in ((8, 16), (16, 8)):
        report = PositionReport(manifest_of((20,)), who, first)
        assert report.add(PositionReport(manifest_of((20,)), who, second))
        assert report.position == 16
        assert not report.add(PositionReport(manifest_of((20,), epoch=1), who, 20))
        assert not report.add("another thing")
        assert report.position == 16
