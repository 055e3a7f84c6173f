"""A trimmer's memory of an epoch, and the portions of its work, without a server."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_common.stream.entries import IndexRecord
from penstock_common.stream.manifest import Manifest
from penstock_producer.write.retention import plan_trim
from penstock_producer.write.trimmer import (
    CHUNK,
    FAR_S,
    LEDGERS_AT_ONCE,
    _AcknowledgedRanges,
    _EpochMemory,
    _plan,
    _portions,
)


def record(first: int, end: int, nbytes: int = 10, *, holes_only: bool = False) -> IndexRecord:
    """Return the record of a block."""
    count = 0 if holes_only else end - first
    holes = tuple(range(first, end)) if holes_only else ()
    return IndexRecord(end, b"" if holes_only else b"%d-0" % end, first, count, nbytes, holes)


def memory_of(sizes: tuple[int, ...] | None, done: dict[int, int] | None = None) -> _EpochMemory:
    """Return a fresh memory of an epoch of these shards."""
    return _EpochMemory(Manifest(0, "id", "sized", "epoch", 0, "", sizes, done or {}, 0, None))


def test_the_floor_rises_over_removed_entries_and_stops_below_one_that_is_held() -> None:
    """Entries below the floor are never read again, so one that was passed over would stay for ever."""
    memory = memory_of((20,))
    memory.gone[0] = {8, 16}
    memory.note(0, [record(0, 4, holes_only=True), record(4, 8), record(8, 12), record(12, 16)])
    assert (memory.floors, memory.gone) == ({0: 8}, {0: {16}})
    memory.gone[0].add(12)
    memory.note(0, [record(8, 12), record(12, 16), record(16, 20)])
    assert (memory.floors, memory.gone) == ({0: 16}, {0: set()})
    memory.note(0, [record(18, 20, holes_only=True)])
    assert memory.floors == {0: 16}, "there is a gap before it"


@pytest.mark.parametrize(
    ("sizes", "done", "floor", "is_over"),
    [
        ((8,), None, 8, True), ((8,), None, 7, False), ((8,), None, 9, True), (None, {0: 8}, 8, True),
        (None, {0: 8}, 7, False), (None, {}, 8, False),
    ],
)  # fmt: skip
def test_a_complete_shard_without_entries_is_forgotten(
    sizes: tuple[int, ...] | None, done: dict[int, int] | None, floor: int, is_over: bool
) -> None:
    """A shard that is still written gets more entries."""
    memory = memory_of(sizes, done)
    memory.floors[0], memory.gone[0] = floor, set()
    memory.end(0)
    assert (memory.over, memory.floors, memory.gone) == (({0}, {}, {}) if is_over else (set(), {0: floor}, {0: set()}))


def test_the_highest_begun_shard_is_remembered_and_those_beyond_are_read_seldom() -> None:
    """A plan of thousands of shards that have nothing yet would cost a request each, every time."""
    memory = memory_of(None)
    for ends, begun in (({0: 0}, -1), ({0: 4, 5: 1, 6: 0}, 5), ({2: 9}, 5), ({6: 2}, 6)):
        memory.see(ends)
        assert memory.begun == begun
    looks = [memory.is_far_due(now_s) for now_s in (0.0, FAR_S / 2, FAR_S, 1.5 * FAR_S, 2 * FAR_S)]
    assert looks == [True, False, True, False, True]


def test_what_was_read_is_continued_behind_its_last_record() -> None:
    """The end of a shard's index shows that all that is acknowledged was read."""
    one = _AcknowledgedRanges([], 0, 12, 0)
    one.read_on([record(0, 4), record(4, 8)])
    assert one.read == 8
    one.read_on([])
    assert one.read == 12


@pytest.mark.parametrize(
    ("shards", "sizes"), [(0, []), (1, [1]), (2, [1, 1]), (10, [1, 2, 4, 3]), (50, [1, 2, 4, 8, 16, 16, 3])]
)
def test_one_shard_is_asked_about_first_and_then_more_and_more(shards: int, sizes: list[int]) -> None:
    """Large shards free enough at once, and of small ones many are needed."""
    portions = list(_portions(range(100, 100 + shards)))
    assert [len(some) for some in portions] == sizes
    assert [shard for some in portions for shard in some] == list(range(100, 100 + shards))
    assert max(sizes, default=0) <= LEDGERS_AT_ONCE


def test_a_plan_takes_acknowledged_entries_in_order_until_enough_is_free() -> None:
    """It takes no more than is needed, and nothing twice."""
    pages = {0: [record(0, 4), record(4, 8), record(8, 12)], 1: [record(0, 4), record(4, 8)]}
    todo = {shard: _AcknowledgedRanges([np.ones(20, bool)], 0, 8, 0) for shard in pages}
    nothing: dict[int, set[int]] = {0: set(), 1: set()}
    cases: list[tuple[dict[int, set[int]], int, dict[int, set[int]], list[tuple[int, int]]]] = [
        (nothing, 1000, {}, [(0, 4), (0, 8), (1, 4), (1, 8)]),
        (nothing, 20, {}, [(0, 4), (0, 8)]),
        (nothing, 21, {}, [(0, 4), (0, 8), (1, 4)]),
        ({0: {4}, 1: {8}}, 1000, {}, [(0, 8), (1, 4)]),
        ({0: {4}, 1: {8}}, 0, {}, []),
        ({0: {4}, 1: set()}, 1000, nothing, [(1, 4)]),  # each of the others has a neighbour that goes
        ({0: {4}, 1: set()}, 1000, {0: {4}, 1: set()}, [(0, 8), (1, 4)]),
    ]
    for gone, need, before, ends in cases:
        assert [(shard, found.end) for shard, found in _plan(pages, todo, gone, need, before)] == ends
    many = {0: [record(number, number + 1, 1) for number in range(CHUNK + 5)]}
    bits = _AcknowledgedRanges([np.ones(CHUNK + 5, bool)], 0, CHUNK + 5, 0)
    assert len(_plan(many, {0: bits}, {0: set()}, 10**6, {})) == CHUNK


@pytest.mark.parametrize(
    ("held", "gone", "gone_before", "ends"),
    [
        ((), (), None, [4, 8, 12, 16]),
        ((), (4, 12), None, [8, 16]),
        ((), (), (), [4, 12]),
        ((), (4,), (), [12]),
        ((), (4,), (4,), [8, 16]),
        ((), (4, 8), (4,), [16]),
        (range(4, 8), (4,), (), [12]),  # the one that stays is no neighbour that goes
        (range(5, 6), (), (), [4, 12]),
    ],
)
def test_an_entry_may_stay_beside_one_that_goes(
    held: tuple[int, ...], gone: tuple[int, ...], gone_before: tuple[int, ...] | None, ends: list[int]
) -> None:
    """The server reuses the memory of single entries, and gives that of neighbours back to the kernel."""
    bits = np.ones(16, bool)
    bits[list(held)] = False
    records = [record(first, first + 4) for first in (0, 4, 8, 12)]
    plan = plan_trim(records, [bits], 1000, gone=gone, gone_before=gone_before)
    assert [found.end for found in plan] == ends
