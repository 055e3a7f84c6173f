"""Following what is written to a stream: index records as they come, which describe an entry without its payload."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import Record, index_ends, parse_id
from penstock_common.stream.groups.roster import server_ms
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest, retained_epochs
from penstock_common.stream.streams import load_stream
from penstock_common.stream.watching.index_ends import due_shards, newest_records, read_on


@dataclass(frozen=True, slots=True)
class Written:
    """One block: an entry, or with ``entry`` empty a range of which no sample could be made."""

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


class Tail:
    """A tail of one stream, from now on. A stream that is deleted ends it with StreamNotFound."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._stream = load_stream(client, name)
        self._ends: dict[int, dict[int, int]] = {}
        """Epoch -> shard -> offsets seen."""
        self._looks = 0
        for manifest in self._manifests():
            where = {s: self._stream.partition_of(s) for s in begun_shards(client, self._stream, manifest)}
            ends = self._ends.setdefault(manifest.epoch, {})
            for partition in self._stream.partitions:
                mine = [shard for shard, owner in where.items() if owner == partition]
                ends |= index_ends(client, partition, manifest.epoch, mine)

    def last(self, count: int) -> list[Written]:
        """Return the entries written last, of the newest epochs that have any, oldest first. Ask it before `look`."""
        found: list[Written] = []
        now = server_ms(self._client)
        for manifest in reversed(self._manifests()):
            begun = begun_shards(self._client, self._stream, manifest)
            where = {shard: self._stream.partition_of(shard) for shard in begun}
            newest = newest_records(self._client, where, manifest.epoch, count - len(found)) if count else []
            found = [_written(manifest.epoch, shard, record, now) for shard, record in newest] + found
            if len(found) >= count:
                break
        return found

    def look(self) -> list[Written]:
        """Return what was written since the last look, in order of time as far as entries tell it."""
        self._stream = load_stream(self._client, self._stream.name)
        self._looks += 1
        found: list[tuple[int, int, Record]] = []
        for manifest in self._manifests():
            ends = self._ends.setdefault(manifest.epoch, {})
            due = due_shards(manifest, begun_shards(self._client, self._stream, manifest), ends, self._looks)
            where = {shard: self._stream.partition_of(shard) for shard in due}
            limits = {shard: ends.get(shard, 0) for shard in due}
            for shard, records in read_on(self._client, where, manifest.epoch, limits).items():
                ends[shard] = records[-1].end if records else limits[shard]
                found += [(manifest.epoch, shard, record) for record in records]
        if not found:
            return []
        now = server_ms(self._client)
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


def _written(epoch: int, shard: int, record: Record, now_ms: int) -> Written:
    age = max(0.0, (now_ms - parse_id(record.entry_id)[0]) / 1000) if record.entry_id else None
    return Written(
        epoch, shard, record.first, record.end, record.count, len(record.holes), record.nbytes,
        record.entry_id.decode(), age, record.segment,
    )  # fmt: skip
