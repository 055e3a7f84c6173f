"""Entries on their way from the server into the rows of batches.

This file has the connection, the receiver, the check of the index, and the check of deliveries after a failover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, SegmentGone, ServerUnavailable, UncommittedEntry
from penstock_common.segments.reader import SegmentReader
from penstock_common.server.channel import SKIP, Channel, EntrySink, Reply, ReplyError, Skip
from penstock_common.server.client import FailoverDetector
from penstock_common.server.connection import open_channels
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, EntryId, Refused, parse_id
from penstock_common.stream.damage import damage_of
from penstock_common.stream.entries import is_indexed, last_given
from penstock_common.stream.groups.ledger import runs
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import LAST, PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify, Outage
from penstock_common.wire.block import Column, offsets_of
from penstock_common.wire.codec import check_values, decode_column, require_codecs, unpacked, verify
from penstock_common.wire.dtypes import BOOL
from penstock_common.wire.header import Header, SegmentRef, parse_header
from penstock_common.wire.limits import MAX_FIELD_BYTES, MAX_HEADER_BYTES
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import META_FIELD, Spec
from penstock_consumer.stages.batch import Assembler, BatchSpan, Lease, as_ragged
from penstock_consumer.stages.queue import ReaderQueue
from penstock_consumer.stages.stats import ReaderTimes


class ReaderConnection:
    """A reader's connection, opened when it is needed and again after an outage. One thread uses it."""

    def __init__(self, client: Client, queue: ReaderQueue, notify: Notify, what: str = "") -> None:
        """Begin. Messages name what is read as ``what``, or as the whole stream if it is ''."""
        self.client = client
        """The control connection to the same server."""
        self._queue, self._what = queue, what
        self._channel: Channel | None = None
        self._outage = Outage(notify, doing="reading", what=what)

    def open(self) -> Channel:
        """Return the connection. Raises ServerUnavailable."""
        if self._channel is None:
            self._channel = open_channels(self.client)
        return self._channel

    def reopen(self, error: ServerUnavailable, then: Callable[[], object] = lambda: None) -> None:
        """Connect again as soon as the server answers, then call ``then``. Raises ServerUnavailable after too long.

        A reader whose queue is stopped does not wait for a server.
        """
        self.close()
        self._queue.reader_times.to("server")
        while True:
            if self._queue.is_stopped:
                raise error
            self._queue.tell_trouble(f"{self._what}: {error}" if self._what else str(error))
            self._outage.bear(error)
            try:
                self.open()
                then()
                self._queue.tell_trouble("")
                return
            except ServerUnavailable as again:
                error = again

    def answered(self) -> None:
        """Note that the server answers, so that the next outage is another one."""
        self._outage.over()

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None


_LIST_COMMITTED = load_script("list_committed").encode()
"""The script is sent in full. It is short, and the server may forget a digest."""

CHECK_PAGE, CHECK_PAGE_MOST = 32, 256
"""The index records that a group's only member asks for at first and at most. Each page of a shard is twice as large as
the one before, if that one was full. The members of a group divide the first page. More are asked for if an answer
brings more entries, because these follow each other.
"""
MOST_SHARDS = 256
"""The most shards with a page in memory."""


class CommitCheck:
    """The test whether an index record names an entry. One thread uses it, on a connection of its own."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client, self._stream = client, stream
        self._channel: Channel | None = None
        self._pages: dict[tuple[int, int], dict[bytes, bytes]] = {}
        """(epoch, shard) -> id of a record, which is the block's end -> id of its entry."""
        self._awaited: tuple[int, int] | None = None
        """The epoch and shard of the page that was asked for and not read."""
        self._asked = 0
        """The records that were asked for with it."""
        self._full: dict[tuple[int, int], int] = {}
        """(epoch, shard) -> the records of its last page, if that was full."""
        self._ahead = self._size = CHECK_PAGE

    def begin(self, members: int) -> None:
        """Forget the pages of earlier epochs. ``members`` divide what comes."""
        self._pages.clear()
        self._full.clear()
        self._ahead = self._size = max(1, CHECK_PAGE // members)

    def expect(self, entries: int) -> None:
        """Expect at most this many entries in the next answer."""
        self._size = max(self._ahead, entries)

    def ask(self, header: Header) -> None:
        """Ask for the records from the end of an entry on, unless its record is known."""
        at = header.epoch, header.shard
        page = self._pages.get(at)
        if page is not None and b"%d-0" % header.end in page:
            return
        self._receive()  # of an entry that was bad in itself
        key = self._stream.partition_of(header.shard).index(header.epoch, header.shard).encode()
        try:
            if self._channel is None:
                self._channel = open_channels(self._client)
            self._asked = max(self._size, min(2 * self._full.get(at, 0), CHECK_PAGE_MOST))
            self._channel.send([(b"EVAL", _LIST_COMMITTED, b"1", key, b"%d-0" % header.end, b"%d" % self._asked)])
            self._awaited = at
        except ServerUnavailable:  # idle for too long, perhaps: `require` asks the control client, which bears outages
            self.close()

    def require(self, header: Header, entry_id: bytes) -> None:
        """Raise UncommittedEntry unless the index or a repair names the entry. Raises ServerUnavailable, DamagedKey."""
        self._receive()
        at = header.epoch, header.shard
        page = self._pages.get(at)
        record_id = b"%d-0" % header.end
        if page is not None and page.get(record_id) == entry_id:
            return
        partition = self._stream.partition_of(header.shard)
        if not is_indexed(self._client, partition, *at, header.end, entry_id):
            raise UncommittedEntry(
                f"no record of the index names this entry, which claims shard {header.shard} offsets "
                f"{header.first}-{header.end - 1}: no commit of Penstock wrote it, or its record was lost; "
                f"`penstock audit {self._stream.name}` tells"
            )
        if page is not None and record_id in page:  # a server that came back from an earlier moment
            del self._pages[at]

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._awaited = None

    def _receive(self) -> None:
        channel = self._channel
        if self._awaited is None or channel is None:
            return
        at, self._awaited = self._awaited, None
        try:
            reply = channel.read()
        except ServerUnavailable:
            self.close()
            return
        if isinstance(reply, Refused):  # the control client asks for each entry, and raises
            self.close()
        page = _page(reply)
        if len(self._pages) >= MOST_SHARDS:
            self._pages.clear()
            self._full.clear()
        self._pages[at], self._full[at] = page, len(page) if len(page) >= self._asked else 0


def _page(reply: Reply) -> dict[bytes, bytes]:
    """Return entry ids by record id, or none after an error of the script."""
    words = reply.split() if isinstance(reply, bytes) else []
    return dict(zip(words[::2], words[1::2], strict=False))


class DeliveryCheck:
    """The test whether a server may have lost that it delivered an entry. A partition is used by one thread at a time.

    A replica that takes over may lack that an entry was delivered and acknowledged. It delivers the entry again, as a
    new one. The member that acknowledged it sends the acknowledgement again, so the ledger knows what is done.
    """

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client.impatient()
        self._failovers = FailoverDetector(self._client)
        self._rosters = [partition.roster for partition in stream.partitions]
        self._newest: dict[tuple[int, int], EntryId] = {}
        """(partition, epoch) -> the newest entry that the server had when it was found to be another one."""

    def look(self, partitions: Sequence[PartitionKeys], settle: Callable[[], object] = lambda: None) -> None:
        """Call ``settle``, and doubt the entries of now, if a server may lack what it had at the last call.

        The first call for a partition only learns its server. Raises ServerUnavailable.
        """

        def doubt(lost: list[int]) -> None:
            newest = self._newest_entries([partitions[number] for number in lost])
            settle()
            self._newest |= newest

        self._failovers.check([self._rosters[partition.number] for partition in partitions], doubt)

    def doubts(self, partition: int, epoch: int, entry_id: bytes) -> bool:
        """Return whether a new entry may have been delivered and acknowledged before."""
        newest = self._newest.get((partition, epoch))
        return newest is not None and parse_id(entry_id) <= newest

    def _newest_entries(self, partitions: Sequence[PartitionKeys]) -> dict[tuple[int, int], EntryId]:
        found = {}
        for partition in partitions:
            for epoch in load_roster(self._client, partition).epochs:
                if (last := last_given(self._client, partition, epoch).get(LAST)) is not None:
                    found[partition.number, epoch] = last
        return found


class ReadScope(Protocol):
    """The part of an epoch that a receiver reads, and the samples that it wants of each entry."""

    def check(self, header: Header) -> None:
        """Raise BadEntry unless the header's identity lies inside the manifest."""

    def wanted(self, header: Header, entry_id: bytes) -> NDArray[np.bool_] | NDArray[np.int64] | None:
        """Return which samples of an entry are wanted: a bit for each offset of [first, end), or rows, or None for all.

        Rows are indices of the entry's samples, in the order wanted. They may repeat.
        """


def check_identity(header: Header, stream: Stream, manifest: Manifest) -> None:
    """Raise BadEntry unless the header names this stream and epoch, and offsets that the manifest has."""
    if header.stream != stream.id or header.epoch != manifest.epoch:
        raise BadEntry(f"entry of stream {header.stream} epoch {header.epoch}, found in {stream.id} {manifest.epoch}")
    if header.end > manifest.shard_size(header.shard):
        raise BadEntry(f"shard {header.shard} offsets {header.first}-{header.end - 1} are not in the manifest")


@dataclass(slots=True)
class ReceivedEntry:
    """An entry that was received, with its lease or its error."""

    entry_id: bytes
    nbytes: int
    lease: Lease | None
    """The lease, or None if the entry is bad or none of its samples was wanted."""
    error: BadEntry | None = None
    is_missing: bool = False
    header: Header | None = None
    """The header, if it could be believed."""


def read_by_id(connection: ReaderConnection, sink: EntrySink, reader_times: ReaderTimes, key: str) -> int:
    """Receive the answer to a request by id, and return the number of its entries.

    The entries exist already, so the wait is for the server. Raises DamagedKey if ``key`` is of another type.
    """
    reader_times.to("server")
    channel = connection.open()
    before_s = channel.waited_s
    try:
        found = channel.read_entries(sink)
    except ReplyError as error:
        raise (damage_of(connection.client, error.error, [key]) or error) from None
    reader_times.received(channel.waited_s - before_s, created_s=0.0)
    return found


class IncomingEntry:
    """One entry while it is received: its header, its fields so far, and what is wrong with it."""

    __slots__ = (
        "_came", "_due", "entry_id", "error", "fields", "header", "is_fixed", "meta", "nbytes", "received", "wanted",
    )  # fmt: skip

    def __init__(self, entry_id: bytes) -> None:
        self.entry_id = entry_id
        self.header: Header | None = None
        self.meta = b""
        """The header's bytes."""
        self.error: BadEntry | None = None
        self.wanted: NDArray[np.bool_] | NDArray[np.int64] | None = None
        """See `ReadScope.wanted`."""
        self.received: list[Any] = []
        """The memory of the payload fields, in order."""
        self.fields: dict[bytes, NDArray[np.uint8]] = {}
        """The payload fields whose bytes are not in batches."""
        self.is_fixed = False
        """Whether the header announces the size of the field that was accepted last."""
        self.nbytes = 0
        self._due: Sequence[tuple[bytes, int | None]] = ()
        """The payload fields that the header announces."""
        self._came = 0
        """The number of these fields that have come."""

    def accepts(self, name: bytes, nbytes: int) -> bool:
        """Return whether the next field is as expected. From the first that is not, the entry is bad."""
        self.nbytes += nbytes
        if self.error is not None:
            return False
        if self.header is None:
            if name == META_FIELD and nbytes <= MAX_HEADER_BYTES:
                return True
            self.error = BadEntry(f"the first field is {name[:40]!r} of {nbytes} bytes, expected 'meta'")
            return False
        expected, announced = self._due[self._came] if self._came < len(self._due) else (b"no more", None)
        if expected != name or self._came == len(self._due):
            self.error = BadEntry(f"field {name[:40]!r}, expected {expected.decode()}")
            return False
        self._came += 1
        if nbytes > MAX_FIELD_BYTES or (announced is not None and announced != nbytes):
            self.error = BadEntry(f"field {name.decode()!r} has {nbytes} bytes, expected {announced}")
            return False
        self.is_fixed = announced is not None
        return True

    def open(self, header: Header, meta: bytes, wanted: NDArray[np.bool_] | NDArray[np.int64] | None) -> None:
        """Expect the fields that the header announces. ``meta`` is the header's bytes."""
        self.meta, self.wanted = meta, wanted
        self._due = header.fields() if header.ref is None else ()
        self.nbytes += 0 if header.ref is None else sum(header.ref.sizes)
        self.header = header

    def refuse(self, error: BadEntry) -> None:
        """Note what is wrong with the entry."""
        self.error = error

    def keep(self, name: bytes, nbytes: int) -> list[memoryview]:
        """Return memory of its own for a field."""
        self.fields[name] = np.empty(nbytes, dtype=np.uint8)
        return [self.fields[name].data]

    def adopt(self, header: Header, views: Sequence[NDArray[np.uint8]]) -> None:
        """Take the fields from their place in a segment."""
        for (name, _), view in zip(header.fields(), views, strict=True):
            self.fields[name] = view

    def complete(self) -> Header:
        """Return the header once all fields came. Raises BadEntry if some did not."""
        if self.header is None or self._came < len(self._due):
            missing = ", ".join(name.decode() for name, _ in self._due[self._came :]) or "meta"
            raise BadEntry(f"fields are missing: {missing}")
        return self.header

    def release(self) -> None:
        """Refer to the memory of the fields no more."""
        self.received, self.fields = [], {}


class Receiver:
    """Receives the entries of one partition and epoch into an assembler."""

    def __init__(
        self,
        spec: Spec,
        assembler: Assembler,
        scope: ReadScope,
        partition: int,
        report: Callable[[ReceivedEntry], None],
        segments: SegmentReader | None = None,
        index: CommitCheck | None = None,
    ) -> None:
        """``segments`` has the payloads that headers refer to; None where they travel in the entries.

        ``index`` is compared with each entry; None where the entries' ids were read from it.
        """
        self._segments, self._index = segments, index
        self._spec, self._assembler, self._scope, self._partition = spec, assembler, scope, partition
        self._report = report
        self._ragged = any(tensor.is_ragged for tensor in spec)
        self._placed = {tensor.name.encode(): tensor.name for tensor in spec if not tensor.is_ragged}
        """Fields whose bytes may be received where batches have them."""
        self._bools = [tensor for tensor in spec if tensor.dtype == BOOL and not tensor.is_ragged]
        self._entry = IncomingEntry(b"")

    def begin(self, entry_id: bytes) -> None:
        """Begin an entry."""
        self._entry = IncomingEntry(entry_id)

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """Return where a field goes: whole fixed tensors into batches, all else into memory of its own.

        The header goes to `value`.
        """
        entry = self._entry
        if not entry.accepts(name, nbytes):
            return SKIP
        return None if entry.header is None else self._views(entry.header, name, nbytes, entry.is_fixed)

    def _views(self, header: Header, name: bytes, nbytes: int, is_fixed: bool) -> Sequence[memoryview]:
        entry = self._entry
        if is_fixed and entry.wanted is None and name in self._placed:
            views = self._assembler.places(self._placed[name], header.count)
        else:
            views = entry.keep(name, nbytes)
        entry.received.extend(views)
        return views

    def value(self, name: bytes, data: bytes) -> None:
        """Read the header."""
        try:
            header = parse_header(data, self._spec, takes_refs=self._segments is not None)
            self._scope.check(header)
            if header.compression is not None:
                require_codecs(header)
            self._entry.open(header, data, self._scope.wanted(header, self._entry.entry_id))
            if self._index is not None:
                self._index.ask(header)
        except BadEntry as error:
            self._entry.refuse(error)

    def end(self) -> None:
        """Verify the entry, which has all its fields, then let the batches have it."""
        entry, lease = self._entry, None
        if entry.error is None:
            try:
                lease = self._complete(entry)
            except BadEntry as error:
                entry.refuse(error)
        self._report(ReceivedEntry(entry.entry_id, entry.nbytes, lease, entry.error, header=entry.header))
        entry.release()

    def _complete(self, entry: IncomingEntry) -> Lease | None:
        header = entry.complete()
        if header.ref is not None:
            if self._is_view(header):
                return self._adopt(header, header.ref)
            self._fetch(header, header.ref)
        self._verify(header, entry.received)
        self._require_committed(header)
        if header.compression is not None:
            self._unpack(header, header.compression)
        if entry.wanted is None:
            return self._accept(header)
        offsets = offsets_of(header.first, header.end, header.holes)
        is_mask = entry.wanted.dtype == np.bool_
        kept = np.flatnonzero(entry.wanted[offsets - header.first]) if is_mask else entry.wanted
        rows = kept.astype(np.int64, copy=False)
        lease = self._lease(header, len(rows))
        if lease.unacknowledged:
            spans = [BatchSpan(lease, lo, hi) for lo, hi in runs(offsets[rows])]
            self._assembler.append(self._columns(header), rows, spans)
        return lease

    def _lease(self, header: Header, samples: int) -> Lease:
        return Lease(self._partition, header.epoch, header.shard, self._entry.entry_id, samples)

    def _fetch(self, header: Header, ref: SegmentRef) -> None:
        """Read the payload of an entry that has only a header, to where its fields would have gone."""
        assert self._segments is not None
        fields = zip(header.fields(), ref.sizes, strict=True)
        views = [self._views(header, name, size, announced is not None) for (name, announced), size in fields]
        with self._named(self._segments, header):
            self._segments.read_into(ref, views)

    def _unpack(self, header: Header, compressed: Iterable[str]) -> None:
        """Decompress fields: whole fixed tensors into batches, all else into memory of its own."""
        entry = self._entry
        values = unpacked(header, dict(entry.fields))
        for name in compressed:
            data = np.frombuffer(values[name.encode()], dtype=np.uint8)
            if entry.wanted is not None or name.encode() not in self._placed:
                entry.fields[name.encode()] = data
                continue
            at = 0
            for place in self._assembler.places(name, header.count):
                place[:] = data[at : at + len(place)].data
                at += len(place)

    def _is_view(self, header: Header) -> bool:
        """Return whether the entry is to be delivered where it lies."""
        assert self._segments is not None
        is_whole = self._entry.wanted is None and not self._ragged and header.compression is None
        return self._segments.gives_views and is_whole and self._assembler.takes_whole(header.count)

    def _adopt(self, header: Header, ref: SegmentRef) -> Lease:
        """Take the whole entry as a batch of read-only views of its segment."""
        assert self._segments is not None
        with self._named(self._segments, header):
            views = self._segments.views(ref)
        self._verify(header, views)
        self._require_committed(header)
        self._entry.adopt(header, views)
        lease = self._lease(header, header.count)
        self._assembler.adopt(self._columns(header), [BatchSpan(lease, lo, hi) for lo, hi in self._ranges(header)])
        return lease

    def _verify(self, header: Header, payload: Sequence[Any]) -> None:
        """Compare the checksum, unless a process of this host has done so with the same bytes of a segment."""
        checked = self._segments.checked if self._segments is not None and header.ref is not None else None
        if checked is None or not checked.has(self._entry.meta):
            verify(header, payload)
            if checked is not None:
                checked.note(self._entry.meta)

    @contextmanager
    def _named(self, segments: SegmentReader, header: Header) -> Iterator[None]:
        try:
            yield
        except SegmentGone:
            segments.require()  # with the folder gone it is not this entry that is bad
            self._require_committed(header)  # a copy of an entry that is acknowledged is bad in itself
            raise

    def _require_committed(self, header: Header) -> None:
        """Raise BadEntry for an entry that no commit wrote, before anything of it is in the batches."""
        if self._index is not None:
            self._index.require(header, self._entry.entry_id)

    def _accept(self, header: Header) -> Lease:
        """Take the whole entry. Its fixed tensors are in the batches already."""
        for tensor in self._bools:
            for place in self._assembler.places(tensor.name, header.count):
                check_values(tensor, np.frombuffer(place, dtype=np.uint8))
        ragged = self._ragged_parts(header)
        lease = self._lease(header, header.count)
        spans = [BatchSpan(lease, lo, hi) for lo, hi in self._ranges(header)]
        self._assembler.accept(header.count, spans, ragged)
        return lease

    def _ranges(self, header: Header) -> list[tuple[int, int]]:
        if not header.holes:
            return [(header.first, header.end)]
        return runs(offsets_of(header.first, header.end, header.holes))

    def _columns(self, header: Header) -> dict[str, Column]:
        values: dict[bytes, Any] = dict(self._entry.fields)
        return {tensor.name: decode_column(header, tensor, values) for tensor in self._spec}

    def _ragged_parts(self, header: Header) -> dict[str, Ragged]:
        if not self._ragged:
            return {}
        values: dict[bytes, Any] = dict(self._entry.fields)
        return {t.name: as_ragged(decode_column(header, t, values)) for t in self._spec if t.is_ragged}
