"""Read samples by identity, without a group. This delivers and acknowledges nothing, and adds to no backlog.

It follows the shard indexes, as a replay does. A replay's lease holds a produced epoch while its samples are read. A
running epoch is read as it is, and samples that are trimmed in that time are counted.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, EntryNotFound, EpochNotFound, PenstockError, SegmentGone, Unauthorized
from penstock_common.stream.commands import Client, parse_id
from penstock_common.stream.entries import IndexRecord, count_entries, fetch_fields, index_records, newest_entry
from penstock_common.stream.groups.roster import end_replay, hold_for_replay
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import (
    PRODUCED,
    Manifest,
    begun_shards,
    find_manifest,
    load_manifest,
    retained_epochs,
)
from penstock_common.stream.payloads import reader_of, whole_fields
from penstock_common.stream.streams import Stream, require_there
from penstock_common.tuning import LEASE_S
from penstock_common.wire.block import Block, Column
from penstock_common.wire.codec import Fields, decode
from penstock_common.wire.header import Header
from penstock_common.wire.ragged import row_starts
from penstock_common.wire.spec import Spec
from penstock_consumer.read.receive import check_identity

RENEW_S = 3.0
MOST_UNREADABLE = 32
"""The most unreadable entries in a search for the newest samples. Forged entries must not make it read a stream."""


class Identity(NamedTuple):
    """The name of a sample, for as long as the stream exists."""

    epoch: int
    shard: int
    offset: int

    def __str__(self) -> str:
        return f"{self.epoch}/{self.shard}/{self.offset}"


@dataclass(slots=True)
class EntrySamples:
    """One entry that was read, and which of its samples are wanted."""

    header: Header
    block: Block
    rows: NDArray[np.int64]
    """Rising indices into the block's samples."""

    def identity(self, row: int) -> Identity:
        """Return the identity of one of the block's samples."""
        return Identity(self.header.epoch, self.header.shard, int(self.block.offsets()[row]))


@dataclass(slots=True)
class Sample:
    """One sample: arrays of the sample's shape (0-d for scalars), and ``bytes`` for byte strings."""

    identity: Identity
    tensors: dict[str, Any]


@dataclass(slots=True)
class UnreadSamples:
    """The committed samples that could not be read, and why."""

    trimmed: int = 0
    """The samples that retention removed."""
    unreadable: int = 0
    """The samples whose entry does not decode. `why` is the reason of the first such entry."""
    why: str = ""

    def add_trimmed(self, samples: int) -> None:
        """Count samples that retention removed."""
        self.trimmed += samples

    def add_unreadable(self, samples: int, why: str) -> None:
        """Count samples whose entry does not decode."""
        self.unreadable += samples
        self.why = self.why or why


class SampleReader:
    """A reader of single samples of one epoch, for one thread. It holds a produced epoch until `close`.

    Raises EpochNotFound, and SegmentsUnseen if payloads are in a folder that this process does not see.
    """

    def __init__(
        self, client: Client, stream: Stream, epoch: int | None = None, *, holds: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``epoch`` None means the newest epoch that has samples, else the newest.

        ``holds`` says whether a lease holds a complete epoch during the read. A lease is a write. Without one, an epoch
        that is released during the read raises EpochNotFound.
        """
        self._client, self._stream, self._clock = client, stream, clock
        self.manifest: Manifest = load_manifest(
            client, stream, newest_epoch(client, stream) if epoch is None else epoch
        )
        """The epoch's manifest as it was when reading began."""
        self.spec: Spec = _known_spec(stream)
        self.missed = UnreadSamples()
        self._segments = reader_of(stream)
        self._token = secrets.token_hex(8)
        self._holds, self._held_at = holds and self.manifest.state == PRODUCED, -math.inf
        self._hold()

    @property
    def epoch(self) -> int:
        """Return the epoch's number."""
        return self.manifest.epoch

    # --- what there is ---

    def committed(self) -> int:
        """Return the samples in the index now, without bad ones. This reads ids only."""
        count = sum(record.count for _, _, record in self._records())
        self._require_kept()
        return count

    def drawn(self, chosen: Sequence[int] | NDArray[np.int64] | None = None) -> Iterator[EntrySamples]:
        """Yield the entries in canonical order, with all their samples or those at the ``chosen`` positions.

        A position counts committed samples in canonical order from 0. Positions rise, and none is repeated. Samples
        that are removed or unreadable are left out and counted in `missed`.
        """
        at, begin = 0, 0
        wanted = None if chosen is None else np.asarray(chosen, dtype=np.int64)
        for partition, _, record in self._records():
            rows: NDArray[np.int64] = np.arange(record.count)
            if wanted is not None:
                end = int(np.searchsorted(wanted, at + record.count))
                rows, begin = wanted[begin:end] - at, end
            at += record.count
            if len(rows) and (seen := self._read(partition, record, rows)) is not None:
                yield seen
            if wanted is not None and begin == len(wanted):
                return
        self._require_kept()

    def sample(self, identity: Identity) -> Sample:
        """Return one sample. Raises EntryNotFound if it is a hole, not committed yet, trimmed, or unreadable."""
        shard, offset = identity.shard, identity.offset
        partition = self._stream.partition_of(shard)
        for record in index_records(self._client, partition, self.epoch, shard, after=offset):
            if record.first <= offset < record.end and offset not in record.holes:
                row = offset - record.first - sum(hole < offset for hole in record.holes)
                before = UnreadSamples(self.missed.trimmed, self.missed.unreadable)
                seen = self._read(partition, record, np.array([row]))
                if seen is not None:
                    return samples_of(seen)[0]
                was_trimmed = self.missed.trimmed > before.trimmed
                why = "retention has removed it" if was_trimmed else f"its entry cannot be read: {self.missed.why}"
                raise EntryNotFound(f"sample {identity} of {self._stream.name!r}: {why}")
            if offset in record.holes:
                raise EntryNotFound(
                    f"sample {identity} of {self._stream.name!r} is a bad one, a hole: "
                    f"`penstock bad list {self._stream.name} --epoch {self.epoch}` says why"
                )
            break
        self._require_kept()
        shards = len(begun_shards(self._client, self._stream, self.manifest))
        raise EntryNotFound(
            f"sample {identity} of {self._stream.name!r} is not committed: epoch {self.epoch} has {shards} shards, "
            f"and this one has {self._size_of(shard)} samples so far"
        )

    def _size_of(self, shard: int) -> int:
        records = index_records(self._client, self._stream.partition_of(shard), self.epoch, shard)
        return max((record.end for record in records), default=0)

    def newest(self, count: int, after: dict[int, bytes]) -> tuple[list[Sample], dict[int, bytes]]:
        """Return at most ``count`` samples, newest first, of entries appended ``after`` these ids (partition -> id).

        Also return the ids from which to continue.
        """
        found: list[tuple[tuple[int, int], Sample]] = []
        last = dict(after)
        for partition in self._stream.partitions:
            seen_before = after.get(partition.number, b"0-0")
            for entry_id, samples in self._backwards(partition, seen_before, count):
                last[partition.number] = max(last.get(partition.number, b"0-0"), entry_id, key=parse_id)
                found += [(parse_id(entry_id), sample) for sample in samples]
            found = sorted(found, key=lambda pair: pair[0], reverse=True)[:count]
        return [sample for _, sample in found], last

    def _backwards(self, partition: PartitionKeys, after: bytes, count: int) -> Iterator[tuple[bytes, list[Sample]]]:
        """Yield entries from the newest back to ``after``, until there are ``count`` samples."""
        before, left = b"", count
        for _ in range(count + MOST_UNREADABLE):
            entry = newest_entry(self._client, partition, self.epoch, before)
            if entry is None or parse_id(entry[0]) <= parse_id(after):
                return
            before = entry[0]
            seen = self._decoded(entry[1], None)
            samples = [] if seen is None else samples_of(seen)[-left:][::-1]
            left -= len(samples)
            yield before, samples
            if not left:
                return

    # --- reading ---

    def _records(self) -> Iterator[tuple[PartitionKeys, int, IndexRecord]]:
        for shard in begun_shards(self._client, self._stream, self.manifest):
            partition = self._stream.partition_of(shard)
            for record in index_records(self._client, partition, self.epoch, shard):
                if record.entry_id:
                    yield partition, shard, record

    def _read(self, partition: PartitionKeys, record: IndexRecord, rows: NDArray[np.int64]) -> EntrySamples | None:
        self._hold()
        fields = fetch_fields(self._client, partition, self.epoch, record.entry_id)
        if fields is None:
            require_there(self._client, self._stream)
            self._require_kept()
            self.missed.add_trimmed(len(rows))
            return None
        return self._decoded(fields, rows)

    def _decoded(self, fields: Fields, rows: NDArray[np.int64] | None) -> EntrySamples | None:
        """Decode an entry's ``rows``, or all for None. An entry that differs from its index record is unreadable."""
        try:
            whole = whole_fields(fields, self.spec, self._segments)
            header, block = decode(whole, self.spec, takes_refs=self._segments is not None)
            check_identity(header, self._stream, self.manifest)
            if rows is not None and rows[-1] >= block.count:
                raise BadEntry(f"the entry has {block.count} samples, its index says more")
        except BadEntry as error:
            if isinstance(error, SegmentGone) and self._segments is not None:
                self._segments.require()  # if the folder is gone, the entry is not at fault
            self.missed.add_unreadable(1 if rows is None else len(rows), str(error))
            return None
        return EntrySamples(header, block, np.arange(block.count) if rows is None else rows)

    # --- the lease ---

    def _hold(self) -> None:
        """Take or renew the lease on a complete epoch. A running epoch is not held, so that no writer waits for it."""
        now = self._clock()
        if not self._holds or now - self._held_at < RENEW_S:
            return
        what = f"epoch {self.epoch} of {self._stream.name!r}"
        for partition in self._stream.partitions:
            # a lease that has expired is taken again, and samples removed before that are counted in `missed`
            try:
                is_held = hold_for_replay(
                    self._client, partition, self._token, self.epoch, int(LEASE_S * 1000), renew=False
                )
            except Unauthorized as error:
                raise Unauthorized(
                    f"this user may not write the lease that keeps {what} while it is looked at: look at it without "
                    f"one (--no-lease), or use a trainer's user; {error}"
                ) from error
            if not is_held and find_manifest(self._client, self._stream, self.epoch) is None:
                raise EpochNotFound(f"{what} was released while it was looked at")
        self._held_at = now

    def _require_kept(self) -> None:
        """Raise EpochNotFound if the epoch was released since reading began."""
        with self._client.pipeline(transaction=False) as pipe:
            for partition in self._stream.partitions:
                pipe.get(partition.state(self.epoch))
            states: list[bytes | None] = pipe.execute()
        if any(state is None or state.startswith(b"gone:") for state in states):
            require_there(self._client, self._stream)
            raise EpochNotFound(
                f"epoch {self.epoch} of {self._stream.name!r} was released while it was looked at: look at a later "
                "one, or let a lease hold it (leave out --no-lease)"
            )

    def close(self) -> None:
        """Release the lease on the epoch."""
        if self._segments is not None:
            self._segments.close()
        if self._holds:
            for partition in self._stream.partitions:
                end_replay(self._client, partition, self._token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(PenstockError):  # the lease expires anyway, and the error matters more
            self.close()


def newest_epoch(client: Client, stream: Stream, *, running: bool = False) -> int:
    """Return the newest epoch that has samples, else the newest; with ``running`` the newest. Raise EpochNotFound."""
    states = retained_epochs(client, stream)
    if not states:
        require_there(client, stream)
        raise EpochNotFound(f"stream {stream.name!r} has no epoch yet: start a producer (`penstock produce`)")
    held = (epoch for epoch in sorted(states, reverse=True) if running or count_entries(client, stream, epoch))
    return next(held, max(states))


def _known_spec(stream: Stream) -> Spec:
    if stream.spec is None:
        raise EntryNotFound(f"stream {stream.name!r} has no sample yet: its first one fixes what tensors there are")
    return stream.spec


def samples_of(seen: EntrySamples) -> list[Sample]:
    """Return the wanted samples of an entry, in order. Their arrays are views of it."""
    offsets = seen.block.offsets()
    columns = {column.spec.name: _values_of(column, seen.rows) for column in seen.block.columns}
    return [
        Sample(
            Identity(seen.header.epoch, seen.header.shard, int(offsets[row])),
            {name: values[position] for name, values in columns.items()},
        )
        for position, row in enumerate(seen.rows.tolist())
    ]


def _values_of(column: Column, rows: NDArray[np.int64]) -> list[Any]:
    if column.shapes is None:
        return [column.values[row, ...] for row in rows.tolist()]
    starts = row_starts(column.shapes, column.spec)
    flat = [column.values[starts[row] : starts[row + 1]] for row in rows.tolist()]
    if column.spec.dtype == "bytes":
        return [values.tobytes() for values in flat]
    return [values.reshape(column.shapes[row]) for values, row in zip(flat, rows.tolist(), strict=True)]
