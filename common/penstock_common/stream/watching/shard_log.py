"""The end of one shard's index in memory: the records that some group has not been given yet. Pure.

So looking again costs the server what is new, and not what a group is behind. `onlooker` reads the records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_common.stream.entries import Record, parse_id

EntryId = tuple[int, int]
NOTHING: EntryId = (0, 0)


@dataclass(frozen=True, slots=True)
class Behind:
    """The part of a shard that a group has not read."""

    entries: int = 0
    samples: int = 0
    nbytes: int = 0
    oldest_ms: int | None = None
    """The server's time when the first record of it was written."""


@dataclass(slots=True)
class ShardLog:
    """The records of one shard, rising. Those that all groups have read are forgotten."""

    end: int = 0
    """The offset below which everything is committed."""
    floor: EntryId = NOTHING
    floor_end: int = 0
    """The entry and offset up to which records were forgotten, or never read."""
    ids: list[EntryId] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def add(self, records: Iterable[Record]) -> Behind:
        """Append records in order of offset, and return their sum. Blocks of holes alone only move the end."""
        start = len(self.ids)
        for record in records:
            self.end = max(self.end, record.end)
            if record.entry_id:
                self.ids.append(parse_id(record.entry_id))
                self.ends.append(record.end)
                self.samples.append(record.count)
                self.nbytes.append(record.nbytes)
        return self._from(start)

    def after_entry(self, given: EntryId) -> int:
        """Return where the records begin that a shared group was not given: ids of a shard rise with its offsets."""
        return bisect_right(self.ids, given)

    def after_offset(self, offset: int) -> int:
        """Return where the records begin that an ordered group is not done with."""
        return bisect_right(self.ends, offset)

    def behind(self, start: int) -> Behind:
        """Return the sum of the records from ``start`` on."""
        return self._from(start)

    def forget(self, count: int) -> None:
        """Forget the first records, which every group has read."""
        if count > 0:
            self.floor, self.floor_end = self.ids[count - 1], self.ends[count - 1]
            for column in (self.ids, self.ends, self.samples, self.nbytes):
                del column[:count]

    def _from(self, start: int) -> Behind:
        if start >= len(self.ids):
            return Behind()
        return Behind(
            len(self.ids) - start, sum(self.samples[start:]), sum(self.nbytes[start:]), oldest_ms=self.ids[start][0]
        )
