"""The end of one shard's index in memory: what some group has not been given yet. Pure; reading it is ``onlooker``'s.

So looking again costs the server what is new, and not what a group is behind.
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
    """What of a shard a group has before it."""

    entries: int = 0
    samples: int = 0
    nbytes: int = 0
    oldest_ms: int | None = None
    """When the first of it was written, by the server's clock."""


@dataclass(slots=True)
class ShardLog:
    """Records of one shard, rising; what all groups have behind them is forgotten."""

    end: int = 0
    """Offsets below it are committed."""
    floor: EntryId = NOTHING
    floor_end: int = 0
    """Entry and offset up to which records were forgotten, or never read."""
    ids: list[EntryId] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def add(self, records: Iterable[Record]) -> Behind:
        """Appends records in order of offset; what they come to. Blocks of holes alone only move the end."""
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
        """Where the records begin that a shared group was not given: ids of a shard rise with its offsets."""
        return bisect_right(self.ids, given)

    def after_offset(self, offset: int) -> int:
        """Where the records begin that an ordered group has not settled."""
        return bisect_right(self.ends, offset)

    def behind(self, start: int) -> Behind:
        """What the records from ``start`` on come to."""
        return self._from(start)

    def forget(self, count: int) -> None:
        """Drops the first records: nobody has them before it."""
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
