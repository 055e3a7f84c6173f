"""Shard indexes, many in one round trip: pages of records, what is new at their ends, and a tail of what is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from penstock_common.server.channel import Channel, Command
from penstock_common.stream.commands import Client, EntryId, ask_all, parse_id, server_ms
from penstock_common.stream.entries import (
    PAGE,
    IndexRecord,
    index_ends,
    index_record,
    index_records,
    raise_errors,
)
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest, retained_epochs
from penstock_common.stream.streams import Stream, load_stream


class IndexRange(NamedTuple):
    """The records of one shard that a reader wants."""

    shard: int
    after: int
    """The first of them covers this offset, or is the next one."""
    most: int
    """The number of records. If the shard was repaired, all later ones are read."""


class IndexPages(NamedTuple):
    """The records and ends of one answer."""

    records: list[list[IndexRecord]]
    """The records of each want, in order of offset."""
    ends: list[int]
    """The committed offsets of the awaited shard, then of each followed one. 0 means no change."""


class EpochIndexes:
    """The indexes of one epoch."""

    def __init__(self, client: Client, stream: Stream, epoch: int) -> None:
        self._client, self._stream, self._epoch = client, stream, epoch

    def beside_first(self, wants: Sequence[IndexRange]) -> Sequence[IndexRange]:
        """Return the wants that the server of the first one answers, so that no other server holds it up."""
        servers = self._client.by_server([self._key(want.shard) for want in wants])
        return wants if len(servers) <= 1 else [wants[number] for number in servers[0]]

    def are_together(self, shard: int, other: int) -> bool:
        """Return whether one server answers for both shards."""
        return len(self._client.by_server([self._key(shard), self._key(other)])) == 1

    def read(self, wants: Sequence[IndexRange], follows: Sequence[int] = ()) -> IndexPages:
        """Return the present records, and how far the shards are that the reader ``follows``."""
        return self._pages(wants, follows, ask_all(self._client, self._commands(wants, follows)))

    def await_more(
        self,
        channel: Channel,
        shard: int,
        after: int,
        block_ms: int,
        wants: Sequence[IndexRange],
        follows: Sequence[int],
    ) -> IndexPages:
        """Return the same once a record of a shard ends beyond ``after``, or after ``block_ms`` (> 0).

        ``channel`` must be quiet.
        """
        key = self._stream.partition_of(shard).index(self._epoch, shard).encode()
        awaited = (b"XREAD", b"COUNT", b"1", b"BLOCK", b"%d" % block_ms, b"STREAMS", key, b"%d-0" % after)
        # answered together, because a waiting client holds up all its commands
        commands = [awaited, *self._commands(wants, follows)]
        channel.send(commands)
        replies: list[Any] = [channel.read() for _ in commands]
        parts = [part for command in commands for part in command if type(part) is bytes]
        raise_errors(replies, self._client, [key, *parts])
        first = replies.pop(0)
        found = self._pages(wants, follows, replies)
        return IndexPages(found.records, [_end(first[0][1], key.decode()) if first else 0, *found.ends])

    def _commands(self, wants: Sequence[IndexRange], follows: Sequence[int]) -> list[Command]:
        part, epoch = self._stream.partition_of, self._epoch
        repairs = [
            (b"EXISTS", *[part(s).repairs(epoch, s).encode() for s in shards]) for shards in self._together(wants)
        ]
        pages = [
            (b"XRANGE", part(s).index(epoch, s).encode(), b"(%d-0" % at if at else b"-", b"+", b"COUNT", b"%d" % most)
            for s, at, most in wants
        ]
        ends = [(b"XREVRANGE", part(s).index(epoch, s).encode(), b"+", b"-", b"COUNT", b"1") for s in follows]
        return [*repairs, *pages, *ends]

    def _pages(self, wants: Sequence[IndexRange], follows: Sequence[int], replies: list[Any]) -> IndexPages:
        together = self._together(wants)
        repaired = {shard for shards, count in zip(together, replies, strict=False) if count for shard in shards}
        found, ends = replies[len(together) :][: len(wants)], replies[len(together) + len(wants) :]
        records = [
            [_record(one, self._key(want.shard)) for one in page]
            if want.shard not in repaired
            else list(
                index_records(self._client, self._stream.partition_of(want.shard), self._epoch, want.shard, want.after)
            )
            for want, page in zip(wants, found, strict=True)
        ]
        return IndexPages(
            records, [_end(newest, self._key(shard)) for newest, shard in zip(ends, follows, strict=True)]
        )

    def _key(self, shard: int) -> str:
        return self._stream.partition_of(shard).index(self._epoch, shard)

    def _together(self, wants: Sequence[IndexRange]) -> list[list[int]]:
        """Return the shards by partition. One request asks for all of them whether they were repaired."""
        found: dict[int, list[int]] = {}
        for shard in sorted({want.shard for want in wants}):
            found.setdefault(self._stream.partition_of(shard).number, []).append(shard)
        return list(found.values())


def _record(one: Any, key: str) -> IndexRecord:
    """Return a record that the client has parsed, or that came through a channel."""
    record_id, fields = one
    named = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2]))  # noqa: B905
    return index_record(record_id, named, key)


def _end(records: list[Any], key: str) -> int:
    return _record(records[0], key).end if records else 0


FIRST_PAGE = 8
"""The records that are read first, because most groups are hardly behind."""

LOOK_BACK: Final = 4
"""The records of each shard that show when it was written last. The newest may hold bad samples alone."""
AHEAD: Final = 32
"""The shards after the last begun one that are read each time. Jobs begin them about in order."""
ALL_EACH: Final = 15
"""Every 15th look reads all shards that are not complete, in whatever order they were begun."""

Page = list[tuple[bytes, dict[bytes, bytes]]]


def due_shards(manifest: Manifest, begun: Iterable[int], ends: Mapping[int, int], looks: int) -> list[int]:
    """Return the shards that may have records beyond ``ends``, at this look. Pure."""
    due = [shard for shard in begun if shard not in ends or ends[shard] < manifest.shard_size(shard)]
    if not ends or looks % ALL_EACH == 0 or manifest.sizes is None:
        return due
    last = max((shard for shard, end in ends.items() if end), default=-1)
    return [shard for shard in due if shard <= last + AHEAD]


def newest_records(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, count: int
) -> list[tuple[int, IndexRecord]]:
    """Return (shard, record) of the newest blocks of these shards that have an entry, oldest first."""
    latest: dict[int, EntryId] = {}
    for shard, record in _blocks_at_end(client, where, epoch, list(where), LOOK_BACK):
        latest[shard] = max(latest.get(shard, (0, 0)), parse_id(record.entry_id))
    last = sorted(latest, key=lambda shard: latest[shard])[-count:]  # the newest ones are among these
    found = _blocks_at_end(client, where, epoch, last, count)
    return sorted(found, key=lambda one: parse_id(one[1].entry_id))[-count:]


def _blocks_at_end(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, shards: list[int], each: int
) -> list[tuple[int, IndexRecord]]:
    """Return the last ``each`` records of each shard, without those that have no entry."""
    commands = [("XREVRANGE", where[shard].index(epoch, shard), "+", "-", "COUNT", each) for shard in shards]
    pages: list[Page] = ask_all(client, commands)
    found = [
        (shard, index_record(*one, where[shard].index(epoch, shard)))
        for shard, page in zip(shards, pages, strict=True)
        for one in page
    ]
    return [one for one in found if one[1].entry_id]


def read_forward(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, ends: Mapping[int, int]
) -> dict[int, list[IndexRecord]]:
    """Return shard -> its records that end beyond ``ends``, rising."""
    found: dict[int, list[IndexRecord]] = {shard: [] for shard in where}
    wanted = dict(ends)
    while wanted:
        begins = {shard: f"({end}-0" if end else "-" for shard, end in wanted.items()}
        commands = [
            ("XRANGE", where[shard].index(epoch, shard), at, "+", "COUNT", PAGE) for shard, at in begins.items()
        ]
        pages: list[Page] = ask_all(client, commands)
        more: dict[int, int] = {}
        for shard, page in zip(wanted, pages, strict=True):
            found[shard] += [index_record(*each, where[shard].index(epoch, shard)) for each in page]
            if len(page) == PAGE:
                more[shard] = found[shard][-1].end
        wanted = more
    return found


def read_backward(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, floors: Mapping[int, EntryId | None]
) -> dict[int, list[IndexRecord]]:
    """Return shard -> its newest records, rising.

    They go back to one whose entry is not above the floor. None asks for the newest record alone.
    """
    counts = {shard: 1 if floor is None else FIRST_PAGE for shard, floor in floors.items()}
    commands = [("XREVRANGE", at.index(epoch, shard), "+", "-", "COUNT", counts[shard]) for shard, at in where.items()]
    pages: list[Page] = ask_all(client, commands)
    found: dict[int, list[IndexRecord]] = {}
    for (shard, partition), page in zip(where.items(), pages, strict=True):
        key = partition.index(epoch, shard)
        records = [index_record(*each, key) for each in page]
        floor, is_more = floors[shard], len(page) == FIRST_PAGE
        while floor is not None and is_more and not _reaches(records, floor):
            older: Page = client.xrevrange(key, max=f"({records[-1].end}-0", count=PAGE)
            records += [index_record(*each, key) for each in older]
            is_more = len(older) == PAGE
        found[shard] = records[::-1]
    return found


def _reaches(records: list[IndexRecord], floor: EntryId) -> bool:
    return any(record.entry_id and parse_id(record.entry_id) <= floor for record in records[-FIRST_PAGE:])


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """One block: an entry or, with an empty ``entry``, a range of bad samples."""

    epoch: int
    shard: int
    first: int
    end: int
    """The end of the offsets [first, end) of the shard."""
    samples: int
    bad: int
    bytes: int
    """The payload bytes."""
    entry: str
    """The entry's id in the partition's entries key."""
    age_s: float | None
    """The time since it was written, by the server's clock, or None for a block without an entry."""
    segment: str
    """The file of its payload, if that is not in the entry."""


class IndexTail:
    """A tail of one stream, from now on. A stream that is deleted ends it with StreamNotFound."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._stream = load_stream(client, name)
        self._ends: dict[int, dict[int, int]] = {}
        """Epoch -> shard -> offsets seen."""
        self._looks = 0
        for manifest in self._manifests():
            begun = begun_shards(client, self._stream, manifest)
            self._ends[manifest.epoch] = index_ends(client, self._stream, manifest.epoch, begun)

    def last(self, count: int) -> list[WrittenBlock]:
        """Return the entries written last, of the newest epochs that have any, oldest first. Ask it before `look`."""
        found: list[WrittenBlock] = []
        now = server_ms(self._client, self._stream.partitions[0].roster)
        for manifest in reversed(self._manifests()):
            begun = begun_shards(self._client, self._stream, manifest)
            where = {shard: self._stream.partition_of(shard) for shard in begun}
            newest = newest_records(self._client, where, manifest.epoch, count - len(found)) if count else []
            found = [_written(manifest.epoch, shard, record, now) for shard, record in newest] + found
            if len(found) >= count:
                break
        return found

    def look(self) -> list[WrittenBlock]:
        """Return what was written since the last look, in order of time as far as entries tell it."""
        self._stream = load_stream(self._client, self._stream.name)
        self._looks += 1
        found: list[tuple[int, int, IndexRecord]] = []
        for manifest in self._manifests():
            ends = self._ends.setdefault(manifest.epoch, {})
            due = due_shards(manifest, begun_shards(self._client, self._stream, manifest), ends, self._looks)
            where = {shard: self._stream.partition_of(shard) for shard in due}
            limits = {shard: ends.get(shard, 0) for shard in due}
            for shard, records in read_forward(self._client, where, manifest.epoch, limits).items():
                ends[shard] = records[-1].end if records else limits[shard]
                found += [(manifest.epoch, shard, record) for record in records]
        if not found:
            return []
        now = server_ms(self._client, self._stream.partitions[0].roster)
        written = [_written(*each, now) for each in found]
        return sorted(written, key=lambda one: (parse_id(one.entry.encode()) if one.entry else (0, 0), one.shard))

    def _manifests(self) -> list[Manifest]:
        """Return the manifests of all epochs that may get more, or are new."""
        found = []
        for number, state in retained_epochs(self._client, self._stream).items():
            manifest = find_manifest(self._client, self._stream, number) if self._may_grow(number, state) else None
            if manifest is not None:
                found.append(manifest)
        return found

    def _may_grow(self, number: int, state: str) -> bool:
        return not self._looks or number not in self._ends or state in ("open", "sized") or number == max(self._ends)


def _written(epoch: int, shard: int, record: IndexRecord, now_ms: int) -> WrittenBlock:
    age = max(0.0, (now_ms - parse_id(record.entry_id)[0]) / 1000) if record.entry_id else None
    return WrittenBlock(
        epoch, shard, record.first, record.end, record.count, len(record.holes), record.nbytes,
        record.entry_id.decode(), age, record.segment,
    )  # fmt: skip
