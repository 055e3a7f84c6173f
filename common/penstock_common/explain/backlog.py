"""Backlogs: the index records that groups have yet to read, and the members that groups wait for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import EntryId, Record, parse_id, pending_members
from penstock_common.stream.groups.presence import Liveness, liveness_of
from penstock_common.stream.groups.roster import ORDERED, Roster, rank_member
from penstock_common.stream.keys import PartitionKeys

NOTHING: EntryId = (0, 0)


@dataclass(frozen=True, slots=True)
class ShardBacklog:
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

    def add(self, records: Iterable[Record]) -> ShardBacklog:
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

    def behind(self, start: int) -> ShardBacklog:
        """Return the sum of the records from ``start`` on."""
        return self._from(start)

    def forget(self, count: int) -> None:
        """Forget the first records, which every group has read."""
        if count > 0:
            self.floor, self.floor_end = self.ids[count - 1], self.ends[count - 1]
            for column in (self.ids, self.ends, self.samples, self.nbytes):
                del column[:count]

    def _from(self, start: int) -> ShardBacklog:
        if start >= len(self.ids):
            return ShardBacklog()
        return ShardBacklog(
            len(self.ids) - start, sum(self.samples[start:]), sum(self.nbytes[start:]), oldest_ms=self.ids[start][0]
        )


Missing = dict[tuple[str, str], Liveness]
"""The members, by (group, member)."""
SHOWN = 4


def missing_members(
    client: Client, partition: PartitionKeys, roster: Roster, groups: Iterable[str], now_ms: int
) -> Missing:
    """Return the missing members of these groups in a partition."""
    found: Missing = {}
    members = liveness_of([roster], now_ms)
    for name in sorted(groups):
        record = roster.groups[name]
        if record.kind == ORDERED:
            ranks = [(name, rank_member(rank)) for rank in range(record.world if record.holds else 0)]
            # an ordered group is done with what its slowest rank has acknowledged: a missing rank holds up all
            found |= {who: one for who in ranks if (one := members.get(who, Liveness())).is_silent}
            continue
        silent = {member: one for (group, member), one in sorted(members.items()) if group == name and one.is_silent}
        keys = [(partition, epoch) for epoch in roster.epochs if silent and (name, epoch) not in roster.closed]
        holding = pending_members(client, keys, name)
        found |= {(name, member): one for member, one in silent.items() if holding.get(member)}
    return found


def told_missing(missing: Missing) -> str:
    """Return the missing members for people; the first few by name."""
    each = [f"{member} of group {group} ({_told(one)})" for (group, member), one in missing.items()]
    return ", ".join(each[:SHOWN]) + (f" and {len(each) - SHOWN} more" if len(each) > SHOWN else "")


def _told(one: Liveness) -> str:
    if one.unseen_s is None:
        return "not there"
    return "its process has ended" if one.has_ended else f"{one.unseen_s:.0f} s ago"
