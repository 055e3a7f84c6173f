"""Backlogs: what groups have yet to read or to acknowledge, and the members that groups wait for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock_common.stream.commands import Client, EntryId, parse_id
from penstock_common.stream.entries import IndexRecord, index_records, list_pending, pending_members
from penstock_common.stream.groups.ledger import bits_of_shards, group_bits
from penstock_common.stream.groups.presence import Liveness, liveness_of
from penstock_common.stream.groups.roster import ORDERED, Roster, rank_member
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest
from penstock_common.stream.streams import Stream

NOTHING: EntryId = (0, 0)


@dataclass(frozen=True, slots=True)
class ShardBacklog:
    """The part of a shard that a group has not read."""

    entries: int = 0
    """The entries with a sample that is not read."""
    samples: int = 0
    nbytes: int = 0
    oldest_ms: int | None = None
    """The server's time when the first record of it was written."""


@dataclass(slots=True)
class ShardLog:
    """The records of one shard, in order of offset. Records that all groups have read are forgotten."""

    end: int = 0
    """The offset below which everything is committed."""
    floor: EntryId = NOTHING
    floor_end: int = 0
    """The entry and offset up to which records were forgotten, or never read."""
    ids: list[EntryId] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    holes: list[tuple[int, ...]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def add(self, records: Iterable[IndexRecord]) -> ShardBacklog:
        """Append records in order of offset, and return their sum. Blocks of holes alone only move the end."""
        start = len(self.ids)
        for record in records:
            self.end = max(self.end, record.end)
            if record.entry_id:
                self.ids.append(parse_id(record.entry_id))
                self.firsts.append(record.first)
                self.ends.append(record.end)
                self.holes.append(record.holes)
                self.samples.append(record.count)
                self.nbytes.append(record.nbytes)
        return self.behind(start)

    def after_entry(self, given: EntryId) -> int:
        """Return the index of the first record that a shared group was not given.

        Ids of a shard rise with its offsets.
        """
        return bisect_right(self.ids, given)

    def before(self, entries: Sequence[EntryId]) -> int:
        """Return the index of the first record of these entries, or that of the first one behind them."""
        return bisect_left(self.ids, entries[0])

    def forgot(self, returned: Mapping[str, Sequence[EntryId]]) -> bool:
        """Return whether records were forgotten that may be of the entries that groups got back."""
        return any(entries[0] <= self.floor for entries in returned.values())

    def samples_of(self, entries: Iterable[EntryId]) -> int:
        """Return the samples of those of the entries that are of this shard."""
        wanted = set(entries)
        return sum(count for each, count in zip(self.ids, self.samples, strict=True) if each in wanted) if wanted else 0

    def after_offset(self, offset: int) -> int:
        """Return the index of the first record that an ordered group is not done with."""
        return bisect_right(self.ends, offset)

    def behind(self, start: int) -> ShardBacklog:
        """Return the sum of the records from ``start`` on."""
        if start >= len(self.ids):
            return ShardBacklog()
        return ShardBacklog(
            len(self.ids) - start, sum(self.samples[start:]), sum(self.nbytes[start:]), oldest_ms=self.ids[start][0]
        )

    def waiting(self, start: int, unread_below: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> ShardBacklog:
        """Return the sum of the records from ``start`` on that hold samples which wait for their rank.

        ``unread_below`` counts such samples below offsets, with the bad ones.
        """
        holes = np.array([offset for each in self.holes[start:] for offset in each], dtype=np.int64)
        of = np.repeat(np.arange(len(self.ids) - start), [len(each) for each in self.holes[start:]])
        left = unread_below(np.array(self.ends[start:], dtype=np.int64))
        left -= unread_below(np.array(self.firsts[start:], dtype=np.int64))
        np.subtract.at(left, of, unread_below(holes + 1) - unread_below(holes))
        which = [start + int(at) for at in np.flatnonzero(left)]
        if not which:
            return ShardBacklog()
        nbytes = sum(self.nbytes[at] for at in which)
        return ShardBacklog(len(which), int(left.sum()), nbytes, oldest_ms=self.ids[which[0]][0])

    def forget(self, count: int) -> None:
        """Forget the first records, which every group has read."""
        if count > 0:
            self.floor, self.floor_end = self.ids[count - 1], self.ends[count - 1]
            for column in (self.ids, self.firsts, self.ends, self.holes, self.samples, self.nbytes):
                del column[:count]

    def restart(self, records: Iterable[IndexRecord]) -> None:
        """Hold these records, which are all of the shard, instead of those that are left."""
        self.forget(len(self.ids))
        self.add(records)
        self.floor, self.floor_end = NOTHING, 0


Missing = dict[tuple[str, str], Liveness]
"""The members, by (group, member)."""


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


@dataclass(frozen=True, slots=True)
class GroupBacklog:
    """The bytes that the members of one shared group hold together in a partition."""

    nbytes: int = 0
    """Payload bytes of entries given out and not acknowledged. A partly acknowledged entry counts whole."""
    freed_bytes: int = 0
    """The part of these bytes that this group alone keeps: no other group, pin or replay needs it."""
    members: int = 0
    """The number of members that have such entries."""


def hold_of(
    client: Client, stream: Stream, partition: PartitionKeys, roster: Roster, group: str, *, with_freed: bool
) -> GroupBacklog:
    """Count what a group holds. ``freed_bytes`` is counted only ``with_freed``."""
    kept = roster.pinned | {epoch for epoch, _ in roster.replays.values()}
    total, freed, holders = 0, 0, set[str]()
    for epoch in roster.epochs:
        pending = {entry.entry_id: entry.member for entry in list_pending(client, partition, epoch, group)}
        manifest = find_manifest(client, stream, epoch) if pending else None
        if manifest is None:
            continue
        holders |= set(pending.values())
        for shard, records in _records(client, stream, partition, manifest):
            held = [record for record in records if record.entry_id in pending]
            total += sum(record.nbytes for record in held)
            if with_freed and epoch not in kept and held:
                freed += _freed(client, stream, manifest, roster, group, shard, held)
    return GroupBacklog(total, freed, len(holders))


def unacknowledged_bytes(client: Client, stream: Stream, partition: PartitionKeys, roster: Roster) -> dict[str, int]:
    """Return the payload bytes that the partition keeps for each group, read or not. Groups without any are left out.

    A partly acknowledged entry counts whole.
    """
    found: dict[str, int] = {}
    for epoch in roster.epochs:
        groups = roster.unacknowledged_by(epoch)
        manifest = find_manifest(client, stream, epoch) if groups else None
        if manifest is None:
            continue
        logs = {shard: log for shard, log in _records(client, stream, partition, manifest) if log}
        spans = {shard: (0, log[-1].end) for shard, log in logs.items()}
        for name, record in groups.items():
            bits = bits_of_shards(client, stream, manifest, name, record, spans, may_go=True)
            for shard, log in logs.items():
                for one in log:
                    bits[shard][list(one.holes)] = True
                left = sum(one.nbytes for one in log if not bits[shard][one.first : one.end].all())
                if left:
                    found[name] = found.get(name, 0) + left
    return found


def _records(
    client: Client, stream: Stream, partition: PartitionKeys, manifest: Manifest
) -> Iterator[tuple[int, list[IndexRecord]]]:
    for shard in begun_shards(client, stream, manifest):
        if stream.partition_of(shard) == partition:
            yield shard, list(index_records(client, partition, manifest.epoch, shard))


def _freed(
    client: Client, stream: Stream, manifest: Manifest, roster: Roster, group: str, shard: int,
    held: list[IndexRecord],
) -> int:  # fmt: skip
    """Return the bytes of those records that every other group is done with."""
    epoch, end = manifest.epoch, max(record.end for record in held)
    done = np.ones(end, dtype=bool)
    for name, other in roster.unacknowledged_by(epoch).items():
        if name != group:
            done &= group_bits(client, stream, manifest, name, other, shard, 0, end, may_go=True)
    for record in held:
        done[list(record.holes)] = True
    return sum(record.nbytes for record in held if done[record.first : record.end].all())


def absent_groups(roster: Roster, groups: Iterable[str], now_ms: int) -> dict[str, int]:
    """Return those of the groups that have no live member, with the milliseconds since they were last seen."""
    live = {group for group, _ in _live_members(roster, now_ms)}
    return {name: now_ms - roster.groups[name].seen_ms for name in groups if name in roster.groups and name not in live}


def idle_groups(roster: Roster, now_ms: int) -> dict[str, int]:
    """Return groups whose live members all wait for a batch, with the bytes they have not acknowledged."""
    live = _live_members(roster, now_ms)
    busy = {who[0] for who in live if who not in roster.idle}
    found: dict[str, int] = {}
    for who in live:
        if who[0] not in busy:
            found[who[0]] = found.get(who[0], 0) + roster.idle[who].handed_bytes
    return found


def _live_members(roster: Roster, now_ms: int) -> list[tuple[str, str]]:
    return [who for who, liveness in liveness_of([roster], now_ms).items() if liveness.may_be_at_work]
