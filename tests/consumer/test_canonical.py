"""Canonical order as a pure plan: the rows for each position, for any blocks and holes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.stream.entries import IndexRecord
from penstock_consumer.read.canonical import EpochSteps, IndexedPiece, NoGoodSample, RowRange, joined, resolve


@st.composite
def epochs(draw: st.DrawFn) -> tuple[list[int], set[int], set[int], int]:
    """Draw (block lengths, bad positions, unreadable blocks, total), with at least one good sample."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    total = sum(lengths)
    bad = draw(st.sets(st.integers(0, total - 1)))
    unreadable = draw(st.sets(st.integers(0, len(lengths) - 1), max_size=2))
    good = draw(st.integers(0, total - 1))
    return lengths, bad - {good}, unreadable - {block_of(lengths, good)}, total


def block_of(lengths: list[int], position: int) -> int:
    """Return the block that holds a position."""
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def pieces_of(lengths: list[int], bad: set[int]) -> list[IndexedPiece]:
    """Return one shard of such blocks."""
    pieces, at = [], 0
    for number, length in enumerate(lengths):
        holes = tuple(sorted(p for p in bad if at <= p < at + length))
        kept = length - len(holes)
        pieces.append(
            IndexedPiece(at, 0, IndexRecord(at + length, b"%d-0" % number if kept else b"", at, kept, kept, holes))
        )
        at += length
    return pieces


def cyclic(pieces: list[IndexedPiece], total: int, lo: int) -> Iterator[IndexedPiece]:
    """Yield positions from ``lo`` on without an end."""
    for lap in count():
        for piece in pieces:
            if piece.end + lap * total > lo:
                yield piece.later(lap * total)


def positions_of(take: RowRange, total: int) -> list[int]:
    """Return the positions of the samples that a fetch yields."""
    record = take.piece.record
    good = [offset for offset in range(record.first, record.end) if offset not in record.holes]
    return [good[row] % total for row in take.rows]


@given(epochs(), st.integers(0, 40), st.integers(1, 30))
def test_every_position_is_its_sample_or_the_next_good_one(
    epoch: tuple[list[int], set[int], set[int], int], lo: int, length: int
) -> None:
    """The main rule in one line, against every cut into blocks. Resuming and ranks depend on it."""
    lengths, bad, unreadable, total = epoch
    lost = bad | {p for p in range(total) if block_of(lengths, p) in unreadable}
    takes = list(
        joined(
            resolve(
                cyclic(pieces_of(lengths, bad), total, lo), lo, lo + length, 7, total,
                lambda piece: block_of(lengths, piece.record.first) in unreadable,
            )
        )
    )  # fmt: skip
    found = [position for take in takes for position in positions_of(take, total)]
    wanted = [next(p % total for p in count(position) if p % total not in lost) for position in range(lo, lo + length)]
    assert found == wanted
    assert sum(take.filled for take in takes) == sum(p % total in lost for p in range(lo, lo + length))
    assert [take.first for take in takes] == [7 + sum(len(t.rows) for t in takes[:n]) for n in range(len(takes))]


@given(epochs(), st.integers(1, 4), st.integers(1, 5))
def test_ranks_take_every_position_once_in_equal_steps(
    epoch: tuple[list[int], set[int], set[int], int], world: int, batch: int
) -> None:
    """Unequal ranks hang distributed training, and a position of two ranks is trained on twice."""
    total = epoch[3]
    ranks = [EpochSteps(0, rank, world, batch, "pad") for rank in range(world)]
    taken = [p for s in range(ranks[0].count(total)) for rank in ranks for p in range(*rank.mine(s, total))]
    assert taken == list(range(ranks[0].count(total) * world * batch))
    assert 0 <= len(taken) - total < world * batch
    dropped = EpochSteps(0, 0, world, batch, "drop").count(total)
    assert dropped * world * batch <= total < (dropped + 1) * world * batch


def test_a_run_of_rows_is_one_fetch() -> None:
    """A large entry is fetched once for all its batches, and as a whole if all of it is wanted."""
    pieces = pieces_of([10, 10], {3})
    takes = list(joined([t for lo in (0, 4, 8) for t in resolve(pieces, lo, lo + 4, lo, 20, lambda _: False)]))
    assert [take.rows.tolist() for take in takes] == [[0, 1, 2, 3, 3, 4, 5, 6, 7, 8], [0, 1]]
    assert not takes[0].is_whole
    assert next(resolve(pieces, 10, 20, 0, 20, lambda _: False)).is_whole


def test_entries_of_two_partitions_that_are_called_alike_are_two_fetches() -> None:
    """Ids count milliseconds in each partition separately. Taken for one entry, a batch held rows of another shard."""
    pieces = [IndexedPiece(4 * shard, shard, IndexRecord(4, b"7-0", 0, 4, 4, ())) for shard in (0, 1)]
    takes = list(joined(resolve(pieces, 2, 6, 0, 8, lambda _: False)))
    assert [(take.piece.shard, take.rows.tolist()) for take in takes] == [(0, [2, 3]), (1, [0, 1])]


def test_a_bad_entry_behind_the_rows_needs_no_row() -> None:
    """The sample that replaces a bad one may lie behind it. With a row more, all later batches would be shifted."""
    takes = list(resolve(pieces_of([4, 4, 4], {3, *range(4, 8)}), 0, 4, 0, 12, lambda _: False))
    assert [(take.piece.start, take.rows.tolist()) for take in takes] == [(0, [0, 1, 2]), (8, [0])]


def test_an_epoch_without_a_good_sample_is_said() -> None:
    """Without a good sample none can replace a bad one, and an endless search would be a silent hang."""
    with pytest.raises(NoGoodSample):
        list(resolve(cyclic(pieces_of([3, 4], set(range(7))), 7, 2), 2, 5, 0, 7, lambda _: False))


@pytest.mark.parametrize(
    ("steps", "total", "count", "mine", "ends"),
    [
        (EpochSteps(0, 0, 2, 3, "pad"), 20, 4, [(0, 3), (6, 9), (12, 15), (18, 21)], [6, 12, 18, 24]),
        (EpochSteps(0, 1, 2, 3, "pad"), 20, 4, [(3, 6), (9, 12), (15, 18), (21, 24)], [6, 12, 18, 24]),
        (EpochSteps(0, 1, 2, 3, "drop"), 20, 3, [(3, 6), (9, 12), (15, 18)], [6, 12, 18]),
        (EpochSteps(0, 0, 2, 3, "keep"), 20, 4, [(0, 3), (6, 9), (12, 15), (18, 20)], [6, 12, 18, 24]),
        (EpochSteps(8, 0, 2, 3, "pad"), 20, 2, [(8, 11), (14, 17)], [14, 20]),
        (EpochSteps(8, 1, 2, 3, "pad", (0, 2)), 21, 2, [(11, 14), (23, 26)], [14, 26]),
        (EpochSteps(8, 1, 2, 3, "pad", (1, 2)), 21, 1, [(17, 20)], [20]),
        (EpochSteps(0, 0, 2, 3, "drop", (1, 3)), 29, 1, [(6, 9)], [12]),
        (EpochSteps(30, 0, 2, 3, "pad"), 20, 0, [], []),
        (EpochSteps(20, 0, 2, 3, "pad", (1, 2)), 20, 0, [], []),
    ],
)
def test_an_epoch_is_cut_into_steps(
    steps: EpochSteps, total: int, count: int, mine: list[tuple[int, int]], ends: list[int]
) -> None:
    """A rank that counts its steps otherwise than the others hangs a distributed training."""
    numbers = range(count)
    assert steps.size == 6
    assert steps.count(total) == count
    assert [steps.mine(number, total) for number in numbers] == mine
    assert [steps.end_of(number) for number in numbers] == ends
    assert [steps.needed(number, None) for number in numbers] == ends
    assert [steps.needed(number, total) for number in numbers] == [min(end, total) for end in ends]


@pytest.mark.parametrize(
    ("remainder", "rank", "total", "committed", "coming"),
    [
        ("pad", 0, None, 17, [(0, 3), (6, 9)]),
        ("pad", 0, None, 18, [(0, 3), (6, 9), (12, 15)]),
        ("pad", 0, 20, 20, [(0, 3), (6, 9), (12, 15), (18, 20)]),
        ("pad", 1, 20, 20, [(3, 6), (9, 12), (15, 18)]),  # the last one is filled from the epoch's start
        ("pad", 1, 15, 15, [(3, 6), (9, 12)]),
        ("pad", 0, 18, 18, [(0, 3), (6, 9), (12, 15)]),
        ("pad", 0, 20, 19, [(0, 3), (6, 9), (12, 15)]),
        ("drop", 0, 20, 20, [(0, 3), (6, 9), (12, 15)]),
    ],
)
def test_the_steps_to_come_are_those_that_are_committed(
    remainder: str, rank: int, total: int | None, committed: int, coming: list[tuple[int, int]]
) -> None:
    """Records beyond them do not exist yet, and a request for them would bring nothing."""
    steps = EpochSteps(0, rank, 2, 3, remainder)
    assert list(steps.coming(0, total, committed)) == coming
    assert list(steps.coming(1, total, committed)) == coming[1:]


def test_entries_behind_the_rows_are_not_looked_at() -> None:
    """Each piece may cost a request, and behind the last committed one there is none."""

    def pieces(most: int) -> Iterator[IndexedPiece]:
        yield from pieces_of([4, 4], {2, 7})[:most]
        raise AssertionError("read too far")

    for lo, hi, most, rows in ((0, 4, 1, [[0, 1, 2, 2]]), (1, 6, 2, [[1, 2, 2], [0, 1]]), (4, 7, 2, [[0, 1, 2]])):
        found = list(resolve(pieces(most), lo, hi, 0, 100, lambda _: False))
        assert [take.rows.tolist() for take in found] == rows
