"""An epoch's index records in canonical order, as far as they are committed; what comes next may be waited for.

What they mean for a batch is ``canonical``'s, payloads are fetched by ``reader``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from penstock_common.errors import EpochIncomplete, OrderNeedsSizes
from penstock_common.stream.entries import Record, await_record, index_records
from penstock_common.stream.groups.positions import starts_of
from penstock_common.stream.link.commands import Client
from penstock_common.stream.manifest import PRODUCED, Manifest, begun_shards
from penstock_common.stream.mending.dead import DeadNote
from penstock_common.stream.streams import Stream
from penstock_consumer.ordered.canonical import Piece


class Walk:
    """Goes on from one position; keeps what it has read until told to `forget` it."""

    def __init__(
        self, client: Client, stream: Stream, manifest: Manifest, begun: range, position: int,
        dropped: Sequence[DeadNote] = (),
    ) -> None:  # fmt: skip
        """``begun`` are the shards there may be; ``dropped`` ranges are gone for good, and holes.

        Raises EpochIncomplete where the position lies beyond them.
        """
        self._dropped = dropped
        self._client, self._stream, self._manifest, self._begun = client, stream, manifest, begun
        self._pieces: deque[Piece] = deque()
        self._shard, self._shard_start = self._place_of(position)
        self._offset = position - self._shard_start
        self._records: Iterator[Record] | None = None

    def _place_of(self, position: int) -> tuple[int, int]:
        starts = starts_of(self._manifest, self._begun)
        found = max(((start, shard) for shard, start in starts.items() if start <= position), default=(0, 0))
        return found[1], found[0]

    @property
    def end(self) -> int:
        """All below it, from where the walk began, is read."""
        return self._shard_start + self._offset

    def now(self, manifest: Manifest, begun: range) -> None:
        """The manifest as it is now: shards may have been finished."""
        self._manifest, self._begun = manifest, begun

    def reach(self, position: int) -> bool:
        """Reads on up to a position; whether all below it is committed."""
        while self.end < position:
            if not self._extend():
                return False
        return True

    def advance(self) -> bool:
        """Reads on by one record, needed or not; whether there was one that could be read."""
        return self.reach(self.end + 1)

    def to_the_end(self) -> int:
        """Reads all that is there without a gap; returns its end."""
        while self._extend():
            pass
        return self.end

    def pieces(self, lo: int) -> Iterator[Piece]:
        """The pieces from the one that holds ``lo`` on; ends at what is not committed yet, or the epoch's end."""
        seen = 0
        while True:
            while seen < len(self._pieces):
                if self._pieces[seen].end > lo:
                    yield self._pieces[seen]
                seen += 1
            if not self._extend():
                return

    def forget(self, below: int) -> None:
        """Pieces that end there are not needed any more."""
        while self._pieces and self._pieces[0].end <= below:
            self._pieces.popleft()

    def wait(self, block_ms: int, position: int) -> bool:
        """Waits until all below a position is committed, or the rest of the shard being read; False if it is not.

        Not for each record on the way there: the more ranks there are, the more of them are in one step.
        """
        wanted, size = position - self._shard_start, self._size()
        after = max(self._offset, (wanted if size is None else min(wanted, size)) - 1)
        partition = self._stream.partition_of(self._shard)
        return await_record(self._client, partition, self._manifest.epoch, self._shard, after, block_ms)

    def where(self) -> str:
        """What comes next, in words."""
        size = self._size()
        return f"shard {self._shard} from offset {self._offset}" + ("" if size is None else f" of {size}")

    def _size(self) -> int | None:
        """Of the shard being read, if that is known."""
        if self._manifest.sizes is not None:
            return self._manifest.shard_size(self._shard)
        return self._manifest.done.get(self._shard)

    def _extend(self) -> bool:
        """Reads one more record; False if the next one is not there."""
        while True:
            size = self._size()
            if self._shard >= self._begun.stop:
                return False
            if size is None or self._offset < size:
                break
            self._shard_start += size
            self._shard, self._offset, self._records = self._shard + 1, 0, None
        partition = self._stream.partition_of(self._shard)
        if self._records is None:
            self._records = index_records(
                self._client, partition, self._manifest.epoch, self._shard, after=self._offset
            )
        record = next(self._records, None)
        if record is None:
            self._records = None
            if self._manifest.state == PRODUCED and size is not None:
                self._pass(size)
                return True
            return False
        if record.first > self._offset:
            self._pass(record.first)
        self._pieces.append(Piece(self._shard_start + record.first, self._shard, record))
        self._offset = record.end
        return True

    def _pass(self, hi: int) -> None:
        """Takes what no record names, up to ``hi``, for holes, if an operator gave it up; raises EpochIncomplete."""
        lo = at = self._offset
        for note in sorted(self._dropped, key=lambda note: note.first):
            if note.shard == self._shard and note.first <= at:
                at = max(at, note.end)
        if at < hi:
            raise self._missing(lo, hi)
        self._pieces.append(Piece(self._shard_start + lo, self._shard, Record(hi, b"", lo, 0, 0, ())))
        self._offset = hi

    def _missing(self, lo: int, hi: int) -> EpochIncomplete:
        name = self._stream.name
        return EpochIncomplete(
            f"epoch {self._manifest.epoch} of {name!r}: the index of shard {self._shard} has no record of offsets "
            f"{lo}-{hi - 1}: `penstock audit {name} --repair SOURCE...` makes them again, "
            f"`penstock bad drop {name} {self._manifest.epoch}` goes on without",
            [(self._shard, lo, hi)],
        )


def shards_in_order(client: Client, stream: Stream, manifest: Manifest) -> range:
    """The shards that may have samples; raises OrderNeedsSizes where they have no order yet.

    While an epoch has no sizes, each shard begins where the one before it ended: only the last may be unfinished.
    """
    begun = begun_shards(client, stream, manifest)
    if manifest.sizes is None and begun and begun[-1] not in starts_of(manifest, begun):
        raise OrderNeedsSizes(
            f"epoch {manifest.epoch} of {stream.name!r} is written in {len(begun)} shards at once and has no sizes: "
            "their order is not known. Plan it (`penstock produce`, or Writer.epoch(sizes=...)), write it with one "
            "writer, or read it with a Loader without order="
        )
    return begun
