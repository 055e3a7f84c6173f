"""Canonical order, pure: positions of an epoch -> entries and rows of them. No Redis, no thread, no bytes.

A position counts planned samples: shards in order, offsets in order, holes included. Beyond the epoch's end positions
run on cyclically from its start, which is how a last step is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock_common.stream.entries import IndexRecord

Rows = NDArray[np.int64]


class NoGoodSample(Exception):
    """Raised when no sample of the epoch can be delivered, so nothing can stand in for bad ones."""


@dataclass(frozen=True, slots=True)
class IndexedPiece:
    """One index record in its place: positions [start, end)."""

    start: int
    shard: int
    record: IndexRecord

    @property
    def end(self) -> int:
        """Return the position after its last offset."""
        return self.start + self.record.end - self.record.first

    def later(self, positions: int) -> IndexedPiece:
        """Return this piece, that many positions further on."""
        return replace(self, start=self.start + positions)


@dataclass(slots=True)
class RowRange:
    """Consecutive rows of the batches of one rank, all from one entry: what one fetch brings."""

    piece: IndexedPiece
    rows: Rows
    """The indices of the entry's samples, without holes. They rise, and repeat where they fill holes."""
    first: int
    """The number of the first of them among all rows that this reader hands out."""
    filled: int
    """The number of rows that replace a bad sample."""

    @property
    def is_whole(self) -> bool:
        """Return whether it is every sample of the entry, once, in order."""
        count = self.piece.record.count
        return len(self.rows) == count and self.filled == 0 and bool((self.rows == np.arange(count)).all())


@dataclass(frozen=True, slots=True)
class EpochSteps:
    """The cut of an epoch of ``total`` positions into steps. In each step every rank has a batch.

    ``start`` is where the first step of this reader begins; ``remainder`` says what becomes of a last step that the
    epoch does not fill: 'pad' runs on from the epoch's start, 'drop' leaves it out, 'keep' makes it smaller.
    """

    start: int
    rank: int
    world: int
    batch: int
    remainder: str
    share: tuple[int, int] = (0, 1)
    """(i, n): this reader takes every n-th step, beginning with the i-th. Only these are numbered."""

    @property
    def size(self) -> int:
        """Return the positions in a step."""
        return self.world * self.batch

    def end_of(self, step: int) -> int:
        """Return the position after a step."""
        return self.start + (self._whole(step) + 1) * self.size

    def count(self, total: int) -> int:
        """Return the steps from ``start`` to the end of an epoch of ``total`` positions."""
        left = max(total - self.start, 0)
        steps = left // self.size if self.remainder == "drop" else -(-left // self.size)
        first, every = self.share
        return max(0, -(-(steps - first) // every))

    def needed(self, step: int, total: int | None) -> int:
        """Return the position below which all has to be committed before a step can be delivered."""
        end = self.end_of(step)
        return end if total is None else min(end, total)

    def coming(self, step: int, total: int | None, committed: int) -> Iterator[tuple[int, int]]:
        """Yield the positions [lo, hi) of this rank's batches from a step on, as far as all they need is committed."""
        last = None if total is None else self.count(total)
        while (last is None or step < last) and self.needed(step, total) <= committed:
            lo, hi = self.mine(step, total)
            hi = hi if total is None else min(hi, total)
            if lo >= hi:  # filled from the epoch's start
                return
            yield lo, hi
            step += 1

    def _whole(self, step: int) -> int:
        """Return the number that a step of this share has among those of all shares."""
        first, every = self.share
        return first + step * every

    def mine(self, step: int, total: int | None) -> tuple[int, int]:
        """Return the positions [lo, hi) of this rank's batch. A padded batch goes beyond ``total``."""
        lo = self.start + self._whole(step) * self.size + self.rank * self.batch
        hi = lo + self.batch
        return (lo, hi) if total is None or self.remainder != "keep" else (lo, min(hi, total))


def resolve(
    pieces: Iterable[IndexedPiece],
    lo: int,
    hi: int,
    first: int,
    total: int | None,
    is_unusable: Callable[[IndexedPiece], bool],
) -> Iterator[RowRange]:
    """Yield the rows for positions [lo, hi). ``pieces`` begins at ``lo`` or before, and continues cyclically.

    The next good sample replaces a hole, and a sample in an unusable entry. ``first`` numbers the rows.
    Raises NoGoodSample once a whole epoch has none.
    """
    unfilled = 0
    for piece in pieces:
        a, b = max(lo, piece.start), min(hi, piece.end)
        if piece.record.count > 0 and not is_unusable(piece):
            rows, spilt, holes = _rows(piece.record, a - piece.start, max(a, b) - piece.start)
            rows = np.concatenate([np.zeros(unfilled, dtype=np.int64), rows])
            if len(rows):
                yield RowRange(piece, rows, first, unfilled + holes - spilt)
            first += len(rows)
            unfilled = spilt
        else:
            unfilled += max(0, b - a)
        if piece.end >= hi and not unfilled:
            return
        if total is not None and piece.start > hi + total:
            raise NoGoodSample


def _rows(record: IndexRecord, lo: int, hi: int) -> tuple[Rows, int, int]:
    """Return the rows for offsets [first + lo, first + hi), how many need a later row, and how many are holes."""
    if not record.holes:
        return np.arange(lo, hi, dtype=np.int64), 0, 0
    offsets = np.arange(record.first + lo, record.first + hi)
    holes = np.asarray(record.holes, dtype=np.int64)
    good = np.setdiff1d(np.arange(record.first, record.end), holes, assume_unique=True)
    rows = np.searchsorted(good, offsets)  # of a hole: the next good sample
    inside = rows < record.count
    return rows[inside].astype(np.int64), int((~inside).sum()), int(np.isin(offsets, holes).sum())


def joined(takes: Iterable[RowRange]) -> Iterator[RowRange]:
    """Yield ranges, with neighbours from one entry joined, so that an entry is fetched once for its rows.

    Ids are unique within a partition. Entries that two partitions took in the same millisecond have the same id.
    """
    last: RowRange | None = None
    for take in takes:
        if last is not None and _entry_of(last) == _entry_of(take):
            last = RowRange(last.piece, np.concatenate([last.rows, take.rows]), last.first, last.filled + take.filled)
            continue
        if last is not None:
            yield last
        last = take
    if last is not None:
        yield last


def _entry_of(take: RowRange) -> tuple[int, bytes]:
    return take.piece.shard, take.piece.record.entry_id
