"""An epoch's index records by position: which blocks are committed, and where each lies."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from penstock_common.errors import EpochIncomplete, OrderNeedsSizes
from penstock_common.server.background_query import BackgroundQuery
from penstock_common.server.channel import Channel
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import FIRST_PAGE, PAGE, SHARDS_AT_ONCE, IndexRecord
from penstock_common.stream.groups.dead_notes import DeadLetterNote
from penstock_common.stream.groups.losses import describe_loss
from penstock_common.stream.groups.positions import starts_of
from penstock_common.stream.index import EpochIndexes, IndexRange
from penstock_common.stream.manifest import ABANDONED, PRODUCED, Manifest, begun_shards, renewed
from penstock_common.stream.streams import Stream
from penstock_consumer.read.canonical import IndexedPiece


class KnownRecords:
    """Pieces in order of position; no two of them overlap."""

    def __init__(self) -> None:
        self._pieces: list[IndexedPiece] = []

    def add(self, piece: IndexedPiece) -> None:
        """Add a record. It replaces what was known of its positions, because a repair overrides."""
        first = bisect_right(self._pieces, piece.start, key=attrgetter("end"))
        self._pieces[first : bisect_left(self._pieces, piece.end, key=attrgetter("start"))] = [piece]

    def at(self, position: int) -> IndexedPiece | None:
        """Return the piece that covers a position, or None if it was not read."""
        found = bisect_right(self._pieces, position, key=attrgetter("end"))
        if found < len(self._pieces) and self._pieces[found].start <= position:
            return self._pieces[found]
        return None

    def forget(self, below: int) -> None:
        """Forget the pieces that end at or before ``below``, which are not needed any more."""
        del self._pieces[: bisect_right(self._pieces, below, key=attrgetter("end"))]


RANGES = 64
"""The number of ranges of records in one request."""
NEAR_RECORDS = 4
"""Up to this many records between two batches are read too. This costs less than another request."""

Positions = tuple[int, int]
"""A range of positions [lo, hi) in canonical order."""


class IndexWalk:
    """A walk through an epoch's index. It keeps what it has read until `forget`."""

    def __init__(
        self, client: Client, stream: Stream, manifest: Manifest, position: int, dropped: Sequence[DeadLetterNote] = ()
    ) -> None:
        """Begin at a position. All below it counts as committed.

        ``dropped`` ranges are lost permanently and count as holes. Raises OrderNeedsSizes.
        """
        self._dropped = sorted(dropped, key=lambda note: note.first)
        self._client, self._stream, self._name = client, stream, stream.name
        self._indexes = EpochIndexes(client, stream, manifest.epoch)
        self._known = KnownRecords()
        self._has_looked = False
        """Whether the last read also told how far the walk's shard is committed."""
        self._positions_each = 0.0
        """The recent mean number of positions in a record, or 0 before the first."""
        self.now(manifest)
        self._shard, self._end = self._shard_and_offset(position)
        """The shard and offset up to which all is known to be committed."""
        self._ahead: dict[int, int] = {}
        """The committed samples of each later shard at the last look. Several shards may be written at once."""
        self._go_on()

    def now(self, manifest: Manifest) -> None:
        """Take the current manifest, in which more shards may be complete. Raises OrderNeedsSizes."""
        self._manifest, self._begun = manifest, _shards_in_order(self._client, self._stream, manifest)
        self._starts = list(starts_of(manifest, self._begun).values())

    def _shard_and_offset(self, position: int) -> tuple[int, int]:
        """Return (shard, offset) of a position. Shards without samples are passed over."""
        shard = max(bisect_right(self._starts, position) - 1, 0)
        return shard, position - (self._starts[shard] if self._starts else 0)

    # --- how far it is committed ---

    @property
    def end(self) -> int:
        """Return the position below which all, from the start of the walk, is known to be committed."""
        if self._manifest.state == PRODUCED and self._manifest.samples is not None:
            return self._manifest.samples
        return self._starts[self._shard] + self._end if self._shard < len(self._starts) else 0

    def reach(self, position: int) -> bool:
        """Return whether all below a position is committed. Asks the server unless that is known or was just asked."""
        is_news, self._has_looked = not self._has_looked, False
        while is_news and self.end < position:
            stop = self._shard_and_offset(position - 1)[0] + 1
            is_news = self._look(stop) and self._shard + SHARDS_AT_ONCE <= stop
        return self.end >= position

    def to_the_end(self) -> int:
        """Return the end of all that is committed without a gap."""
        while self._look(self._begun.stop):
            pass
        return self.end

    def _look(self, stop: int) -> bool:
        """Ask about the next shards below ``stop``. Return whether more is committed than was known."""
        self._go_on()
        stop = min(stop, self._begun.stop, self._shard + SHARDS_AT_ONCE)
        before, shards = (self._shard, self._end), range(self._shard, stop)
        for shard, end in zip(shards, self._indexes.read([], shards).ends, strict=True):
            self._committed(shard, end)
        return (self._shard, self._end) > before

    def _committed(self, shard: int, end: int) -> None:
        """Note how far a shard is committed. Its records have no gaps, so all before the end of one is committed."""
        if shard > self._shard:
            self._ahead[shard] = max(end, self._ahead.get(shard, 0))
        elif shard == self._shard and end > self._end:
            self._end = end
            self._go_on()

    def _go_on(self) -> None:
        """Continue with the next shard behind a complete one."""
        while (size := self._size(self._shard)) is not None and self._end >= size:
            if self._shard + 1 >= min(self._begun.stop, len(self._starts)):
                return
            self._shard += 1
            self._end = max(self._end - size, self._ahead.pop(self._shard, 0))

    def wait(self, channel: Channel, block_ms: int, position: int, ranges: Iterable[Positions]) -> bool:
        """Wait until all below a position is committed, or as much of a later shard. Return whether there is any news.

        It does not wait for each record or shard before that. The more ranks there are, the more of them are in one
        step. The answer brings the records of these ranges. Nothing else may be under way on ``channel``.
        """
        self._go_on()
        before, wants = self.end, self._unknown(ranges)
        awaited, after = self._awaited(position)
        stop = min(awaited + 2, max(self._begun.stop, awaited + 1))  # and the next one
        if stop > awaited + 1 and not self._indexes.are_together(awaited, awaited + 1):
            stop = awaited + 1
        shards = range(self._shard, stop)
        found = self._indexes.await_more(channel, awaited, after, block_ms, wants, shards)
        for shard, end in zip((awaited, *shards), found.ends, strict=True):
            self._committed(shard, end)
        self._has_looked = self._shard < shards.stop
        self._take(wants, found.records)
        return self.end > before

    def _awaited(self, position: int) -> tuple[int, int]:
        """Return the last shard not known to be committed far enough, and the offset to wait beyond."""
        if not self._starts:
            return self._shard, 0
        last, offset = self._shard_and_offset(position - 1)
        if last >= self._shard + SHARDS_AT_ONCE:
            last, offset = self._shard, self._last_of(self._shard)
        for shard in range(last, self._shard, -1):
            if self._ahead.get(shard, 0) <= offset:
                return shard, offset
            offset = self._last_of(shard - 1)
        size = self._size(self._shard)
        return self._shard, max(self._end, offset if size is None else min(offset, size - 1))

    def _last_of(self, shard: int) -> int:
        """Return the last offset of a shard that has a size, or -1 if it has no samples."""
        return (self._size(shard) or 0) - 1

    def where(self) -> str:
        """Return what comes next, in words."""
        size = self._size(self._shard)
        return f"shard {self._shard} from offset {self._end}" + ("" if size is None else f" of {size}")

    def _size(self, shard: int) -> int | None:
        """Return the size of a shard, or None if it is not known."""
        if self._manifest.sizes is not None:
            return self._manifest.shard_size(shard)
        return self._manifest.done.get(shard)

    # --- records ---

    def pieces(self, lo: int) -> Iterator[IndexedPiece]:
        """Yield the pieces from the one that holds ``lo`` to the first uncommitted position or the epoch's end."""
        while (piece := self._at(lo)) is not None:
            yield piece
            lo = piece.end

    def prepare(self, ranges: Iterable[Positions]) -> None:
        """Read what covers these positions, in one round trip. Nothing is asked if the first range is known."""
        self._read(self._unknown(ranges))

    def forget(self, below: int) -> None:
        """Forget the pieces that end at or before ``below``, which are not needed any more."""
        self._known.forget(below)

    def _unknown(self, ranges: Iterable[Positions]) -> Sequence[IndexRange]:
        """Return what to ask for, or nothing if the first of the ranges is known."""
        todo = iter(ranges)
        first = next(todo, None)
        if first is None or all(self._known.at(position) is not None for position in (first[0], first[1] - 1)):
            return []
        return self._indexes.beside_first(
            [want for lo, hi in self._joined(chain([first], todo)) for want in self._wants(lo, hi)]
        )

    def _joined(self, ranges: Iterable[Positions]) -> list[Positions]:
        """Join near ranges, up to a page of records. While the length of records is unknown, return only the first."""
        joined: list[Positions] = []
        records = 0
        for lo, hi in ranges:
            if joined and lo - joined[-1][1] <= NEAR_RECORDS * self._positions_each:
                records += self._count(hi - joined[-1][1])
                joined[-1] = (joined[-1][0], hi)
            else:
                records += self._count(hi - lo)
                joined.append((lo, hi))
            if not self._positions_each or records >= PAGE or len(joined) >= RANGES:
                break
        return joined

    def _count(self, positions: int) -> int:
        """Return the records that cover this many positions, with spare ones for where they begin and end."""
        return int(positions / self._positions_each * 1.2) + 2 if self._positions_each else FIRST_PAGE

    def _at(self, position: int) -> IndexedPiece | None:
        if (known := self._known.at(position)) is not None:
            return known
        self._read(list(self._wants(position, position + 1)))
        return self._known.at(position)

    def _read(self, wants: Sequence[IndexRange]) -> None:
        """Read records, and how far the walk's shard is."""
        if not wants:
            return
        shard, is_news = self._shard, self._manifest.state != PRODUCED
        found = self._indexes.read(wants, [shard] if is_news else [])
        for end in found.ends:
            self._committed(shard, end)
        self._has_looked = is_news and shard == self._shard
        self._take(wants, found.records)

    def _take(self, wants: Sequence[IndexRange], pages: Sequence[list[IndexRecord]]) -> None:
        """Keep what was read."""
        for (shard, offset, _), page in zip(wants, pages, strict=True):
            size, start = self._size(shard), self._starts[shard]
            if page:
                self._committed(shard, page[-1].end)
                length = (page[-1].end - page[0].first) / len(page)
                self._positions_each = length if not self._positions_each else (self._positions_each + length) / 2
            if page and page[0].first > offset:
                self._pass(shard, offset, page[0].first)
            elif not page and size is not None and self._manifest.state == PRODUCED:
                self._pass(shard, offset, size)
            for record in page:
                self._known.add(IndexedPiece(start + record.first, shard, record))

    def _wants(self, lo: int, hi: int) -> Iterator[IndexRange]:
        """Return what to ask of each shard that has some of these positions."""
        while lo < hi and self._starts:
            shard, offset = self._shard_and_offset(lo)
            size = self._size(shard)
            end = hi - self._starts[shard] if size is None else min(hi - self._starts[shard], size)
            if offset >= end:
                return
            yield IndexRange(shard, offset, self._count(end - offset))
            lo = self._starts[shard] + end

    def _pass(self, shard: int, lo: int, hi: int) -> None:
        """Take what no record names, up to ``hi``, for holes, if an operator gave it up. Raises EpochIncomplete."""
        at = lo
        for note in self._dropped:
            if note.shard == shard and note.first <= at:
                at = max(at, note.end)
        if at < hi:
            raise self._missing(shard, lo, hi)
        self._known.add(IndexedPiece(self._starts[shard] + lo, shard, IndexRecord(hi, b"", lo, 0, 0, ())))

    def _missing(self, shard: int, lo: int, hi: int) -> EpochIncomplete:
        name, missing = self._name, [(shard, lo, hi)]
        why = describe_loss(self._client, self._stream, self._manifest, missing)
        return EpochIncomplete(
            f"epoch {self._manifest.epoch} of {name!r}: the index of shard {shard} has no record of offsets "
            f"{lo}-{hi - 1}{why and f' ({why})'}: `penstock audit {name} --repair SOURCE...` makes them again, "
            f"`penstock bad drop {name} {self._manifest.epoch} --group GROUP` goes on without",
            missing,
        )


class NotCommittedYet(Exception):
    """Raised when the next positions are not committed yet."""


ELSEWHERE_S = 0.2
"""The time for which a reader waits for news of an epoch that another server has. It reads nothing in this time."""


class CanonicalIndex:
    """The index of an epoch that may still be written, in canonical order. Behind the epoch's end it begins again."""

    def __init__(
        self, client: Client, stream: Stream, manifest: Manifest, position: int, dropped: Sequence[DeadLetterNote]
    ) -> None:
        """See `IndexWalk` for the arguments."""
        self.walk = IndexWalk(client, stream, manifest, position, dropped)
        self._client, self._stream, self._dropped = client, stream, dropped
        self._head: IndexWalk | None = None
        """A walk from the first position of the epoch, for what runs on beyond its end."""
        self._broken_off: int | None = None
        """The end of an abandoned epoch."""
        self._news = BackgroundQuery[Manifest](
            is_elsewhere=len(client.by_server([p.roster for p in stream.partitions])) > 1
        )
        self.renew_with(manifest)

    @property
    def total(self) -> int | None:
        """Return the positions in the epoch, as far as they are known."""
        return self._broken_off if self._broken_off is not None else self.manifest.samples

    def renew(self) -> None:
        """Read the manifest again, which may be on another server than what is read. No reader waits for that."""
        manifest = self._news.ask(lambda: renewed(self._client, self._stream, self.manifest), ELSEWHERE_S)
        if manifest is not None:
            self.renew_with(manifest)

    def renew_with(self, manifest: Manifest) -> None:
        """Take the current manifest, in which more shards may be complete."""
        self.manifest = manifest
        for walk in (self.walk, self._head):
            if walk is not None:
                walk.now(manifest)
        if manifest.state == ABANDONED and self._broken_off is None:  # it ends with the committed records
            self._broken_off = self.walk.to_the_end()

    def pieces(self, lo: int) -> Iterator[IndexedPiece]:
        """Yield the pieces from ``lo`` on, cyclically. Raises NotCommittedYet at positions that are not committed."""
        total = self.total
        for piece in self.walk.pieces(lo):
            yield piece
            lo = piece.end
        if total is None or lo < total:
            raise NotCommittedYet
        if self._head is None:
            self._head = IndexWalk(self._client, self._stream, self.manifest, 0, self._dropped)
        laps = total
        while True:
            for piece in self._head.pieces(0):
                yield piece.later(laps)
            laps += total


def _shards_in_order(client: Client, stream: Stream, manifest: Manifest) -> range:
    """Return the shards that may have samples. Raises OrderNeedsSizes if they have no order yet.

    While an epoch has no sizes, each shard begins where the one before it ended. Only the last may be unfinished.
    """
    begun = begun_shards(client, stream, manifest)
    if manifest.sizes is None and begun and begun[-1] not in starts_of(manifest, begun):
        raise OrderNeedsSizes(
            f"epoch {manifest.epoch} of {stream.name!r} is written in {len(begun)} shards at once and has no sizes: "
            "their order is not known. Plan it (`penstock produce`, or Writer.epoch(sizes=...)), write it with one "
            "writer, or read it with a Loader without order="
        )
    return begun
