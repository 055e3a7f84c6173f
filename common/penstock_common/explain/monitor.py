"""A monitor: repeated snapshots of a stream at low cost. They read rosters and new index records, and no payload.

The first snapshot reads as much of the indexes as a group is behind. The monitor remembers what it has read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from penstock_common.explain.backlog import NOTHING, ShardBacklog, ShardLog
from penstock_common.explain.servers import ServerLooks
from penstock_common.explain.snapshot import (
    EpochSnapshot,
    GroupSnapshot,
    MemberSnapshot,
    RankSnapshot,
    StreamSnapshot,
)
from penstock_common.stream.commands import Client, EntryId, Refused, ask_all, parse_id, server_ms
from penstock_common.stream.groups.positions import Positions, known_positions, starts_of
from penstock_common.stream.groups.presence import Liveness, liveness_of
from penstock_common.stream.groups.roster import ORDERED, GroupRecord, Roster, load_roster
from penstock_common.stream.index import due_shards, read_backward, read_forward
from penstock_common.stream.keys import RELEASED, PartitionKeys
from penstock_common.stream.manifest import PRODUCED, Manifest, begun_shards, find_manifest, retained_epochs
from penstock_common.stream.payloads import plane_of
from penstock_common.stream.reported_rates import load_reported_rates
from penstock_common.stream.servers.suitability import combined_memory
from penstock_common.stream.streams import Stream, load_stream, read_counters

PENDING_SEEN: Final = 100
"""The pending entries of a key and group that are asked how often they were given out."""
RETURNED_SEEN: Final = 1000
"""The returned entries of a key and group that do not count as read. A member returns what it had read ahead."""


@dataclass(slots=True)
class _Epoch:
    """The memory of one epoch."""

    manifest: Manifest
    is_new: bool
    """Whether it was opened after the first snapshot, so that everything in it was made since."""
    logs: dict[int, ShardLog] = field(default_factory=dict)
    unread: dict[tuple[str, int], ShardBacklog] = field(default_factory=dict)
    """(group, shard) -> what the group had not read at the last snapshot."""
    bad: int = 0
    dead: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    is_looked_at: bool = False
    """Whether its shards were read before, so that new records were made since."""
    is_finished: bool = False
    """Whether it has ended and all its groups are done with it, so that only its bytes change."""

    def count_bad(self, bad: int, dead: dict[str, int]) -> None:
        """Note the bad samples, and the dead letters of each group."""
        self.bad, self.dead = bad, dead

    def finish(self, *, is_finished: bool) -> bool:
        """Note whether it is finished, and return it."""
        self.is_finished = is_finished
        return is_finished

    def note_read(self, read: dict[str, int]) -> None:
        """Note how many samples each group has read, after its shards were read."""
        self.read, self.is_looked_at = read, True


@dataclass(slots=True)
class GroupTotals:
    """The sums of a group while it is read."""

    entries: int = 0
    samples: int = 0
    nbytes: int = 0
    oldest_ms: int | None = None
    pending: int = 0
    redelivered: int = 0
    dead: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Member -> pending entries."""
    ranks: list[RankSnapshot] = field(default_factory=list)

    def add_unread(self, behind: ShardBacklog) -> None:
        """Add what the group has not read of a shard."""
        self.entries += behind.entries
        self.samples += behind.samples
        self.nbytes += behind.nbytes
        known = [at for at in (self.oldest_ms, behind.oldest_ms) if at is not None]
        self.oldest_ms = min(known, default=None)

    def add_pending(self, summary: dict[str, Any], oldest: list[dict[str, Any]]) -> None:
        """Add the pending entries of a key, as the server sums them up, with the oldest of them."""
        self.pending += int(summary["pending"])
        self.redelivered += sum(int(one["times_delivered"]) > 1 for one in oldest)
        for consumer in summary["consumers"]:
            name = consumer["name"].decode()
            self.held[name] = self.held.get(name, 0) + int(consumer["pending"])

    def add_dead(self, entries: int) -> None:
        """Add dead letters."""
        self.dead += entries


class _Ranks(NamedTuple):
    """The positions of an ordered group's ranks in one epoch."""

    record: GroupRecord
    positions: Positions
    starts: dict[int, int]
    """Shard -> position of its first sample, where it is known."""

    def low(self, shard: int) -> int:
        """Return the offset below which every rank is done."""
        minimum = self.positions.minimum(self.record.world)
        return max(minimum - self.starts[shard], 0) if shard in self.starts else 0

    def behind(self, shard: int, log: ShardLog, index: int) -> ShardBacklog:
        """Return the sum of what waits for its rank, from a record on."""
        start = self.starts.get(shard)
        if start is None or start >= max([self.positions.floor, *self.positions.ranks.values()]):
            return log.behind(index)  # no rank has come this far
        return log.waiting(index, lambda offsets: self.positions.unread_below(self.record, offsets + start))


class _New(NamedTuple):
    """The samples that were made in a shard since the last snapshot."""

    made: ShardBacklog
    is_begun: bool
    """Whether the shard was empty then."""


class StreamMonitor:
    """The repeated snapshots of one stream.

    A stream that is deleted and made again is another one: all counts restart.
    """

    def __init__(self, client: Client, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._name, self._clock = client, name, clock
        self._servers = ServerLooks(client, clock)
        self._id = ""
        self._begin("")

    def _begin(self, stream_id: str) -> None:
        self._id, self._looks = stream_id, 0
        self._epochs: dict[int, _Epoch] = {}
        self._made = [0, 0, 0]
        self._given: dict[str, list[int]] = {}

    def snapshot(self) -> StreamSnapshot:
        """Return the stream as it is now. Raises StreamNotFound, and PartitionsAway while a server is away."""
        client = self._client
        self._servers.look()
        self._servers.require(self._name)
        stream = load_stream(client, self._name)
        servers = self._servers.servers_of(stream)
        if stream.id != self._id:
            self._begin(stream.id)
        rosters = [load_roster(client, partition) for partition in stream.partitions]
        held = {partition.number: roster.bytes for partition, roster in zip(stream.partitions, rosters, strict=True)}
        now_ms = server_ms(client, stream.partitions[0].roster)
        self._remember(stream, rosters)
        sums = {name: GroupTotals() for name in sorted({name for roster in rosters for name in roster.groups})}
        for number, epoch in self._epochs.items():
            self._look_at(stream, number, epoch, rosters, sums)
            for name, count in epoch.dead.items():
                if name in sums:
                    sums[name].add_dead(count)
        self._looks += 1
        following, final, _ = read_counters(client, stream)
        waiting = {at: waiter for roster in rosters for at, waiter in roster.waiting.items()}
        return StreamSnapshot(
            name=stream.name, id=stream.id, at_s=self._clock(),
            budget_bytes=stream.budget_bytes, held_bytes=sum(roster.bytes for roster in rosters),
            next_epoch=following, final=final,
            made_entries=self._made[0], made_samples=self._made[1], made_bytes=self._made[2],
            epochs=tuple(_epoch(number, epoch, rosters) for number, epoch in self._epochs.items()),
            groups=tuple(self._group(name, each, rosters, now_ms) for name, each in sums.items()),
            waiting=waiting,
            waited_s=max(((now_ms - waiter.since_ms) / 1000 for waiter in waiting.values()), default=0.0),
            rates=load_reported_rates(client, stream),
            memory=combined_memory(server.memory for server in servers if not server.failure),
            payload=stream.payload,
            servers=tuple(replace(one, held_bytes=sum(held[at] for at in one.partitions)) for one in servers),
            replays=tuple(
                (epoch, (till - now_ms) / 1000) for epoch, till in rosters[0].replays.values() if till > now_ms
            ),
            now_ms=now_ms,
            is_deleting=stream.is_deleting,
            spare_bytes=plane_of(stream).spare_bytes if any(one.why == "folder" for one in waiting.values()) else 0,
        )  # fmt: skip

    def _remember(self, stream: Stream, rosters: list[Roster]) -> None:
        """Note epochs that were opened or released, and manifests that changed."""
        going = {epoch for roster in rosters for epoch in roster.retiring}
        there = {e: state for e, state in retained_epochs(self._client, stream).items() if e not in going}
        for number in [number for number in self._epochs if number not in there]:
            del self._epochs[number]
        for number, state in there.items():
            known = self._epochs.get(number)
            if known is not None and known.manifest.state == state and known.manifest.sizes is not None:
                continue
            manifest = find_manifest(self._client, stream, number)
            if manifest is None:
                continue
            if known is None:
                self._epochs[number] = _Epoch(manifest, is_new=self._looks > 0)
            else:
                self._epochs[number] = replace(known, manifest=manifest)

    # --- one epoch ---

    def _look_at(
        self, stream: Stream, number: int, epoch: _Epoch, rosters: list[Roster], sums: dict[str, GroupTotals]
    ) -> None:
        readers = _readers(number, rosters)
        reading = [name for name, is_closed in readers.items() if not is_closed]
        if epoch.is_finished and not reading:
            return
        given = self._look_at_counts(stream, number, epoch, list(readers))
        returned = self._returned(stream, number, given, reading)
        had_ended = not reading and epoch.manifest.is_ended and not epoch.is_new and not epoch.logs
        if epoch.finish(is_finished=had_ended):
            return  # everything had ended before the first snapshot
        lasts = dict(zip(stream.partitions, given, strict=True))
        ranks = {name: self._ranks(stream, number, name, rosters, sums[name]) for name in _ordered(reading, rosters)}
        floors = {p.number: _floor(at, reading, returned[p.number]) for p, at in lasts.items()}
        begun = self._read(stream, number, epoch, floors, bool(ranks))
        read = dict.fromkeys(readers, 0)
        for shard, log in epoch.logs.items():
            partition = stream.partition_of(shard)
            at, back = lasts[partition], returned[partition.number]
            if any(_position(log, at, ranks, shard, name) is None for name in reading) or log.forgot(back):
                self._reread(stream, number, shard, log)
            positions = {name: _position(log, at, ranks, shard, name) or 0 for name in reading}
            for name in readers:
                now = ShardBacklog()
                if name in ranks:
                    now = ranks[name].behind(shard, log, positions[name])
                elif name in positions:
                    now = log.behind(positions[name])
                self._count_given(epoch, name, shard, now, begun.get(shard))
                read[name] += log.end - now.samples - log.samples_of(back.get(name, ()))
                if name in positions:
                    sums[name].add_unread(now)
            log.forget(min([*positions.values(), *map(log.before, back.values())], default=len(log.ids)))
        epoch.note_read(read)
        self._look_at_pending(lasts, number, reading, sums)
        is_read = all(log.end >= epoch.manifest.shard_size(shard) for shard, log in epoch.logs.items())
        is_complete = is_read or epoch.manifest.state != PRODUCED
        epoch.finish(is_finished=epoch.manifest.is_ended and not reading and is_complete)

    def _look_at_counts(
        self, stream: Stream, number: int, epoch: _Epoch, readers: list[str]
    ) -> list[dict[str, EntryId]]:
        """Read bad samples and dead letters, and for each partition group -> the last entry that was given out."""
        commands: list[tuple[str, str]] = []
        for partition in stream.partitions:
            commands += [("XINFO GROUPS", partition.entries(number)), ("HLEN", partition.quarantine(number))]
            commands += [("HLEN", partition.dead(number, name)) for name in readers]
        replies = ask_all(self._client, commands, raises=False)
        each = 2 + len(readers)
        parts = [replies[at : at + each] for at in range(0, len(replies), each)]
        bad = sum(_number(part[1]) for part in parts)
        epoch.count_bad(bad, {name: sum(_number(part[2 + at]) for part in parts) for at, name in enumerate(readers)})
        found: list[dict[str, EntryId]] = []
        for part in parts:
            groups = [] if isinstance(part[0], Refused) else part[0]  # released since
            found.append({one["name"].decode(): parse_id(one["last-delivered-id"]) for one in groups})
        return found

    def _returned(
        self, stream: Stream, number: int, given: list[dict[str, EntryId]], reading: list[str]
    ) -> dict[int, dict[str, list[EntryId]]]:
        """Return for each partition group -> the first entries that its members returned as they left."""
        asked = [
            (partition, name)
            for partition, at in zip(stream.partitions, given, strict=True)
            for name in reading
            if name in at
        ]
        with self._client.pipeline(transaction=False) as pipe:
            for partition, name in asked:
                pipe.xpending_range(partition.entries(number), name, "-", "+", RETURNED_SEEN, RELEASED)
            replies = pipe.execute(raise_on_error=False)
        found: dict[int, dict[str, list[EntryId]]] = {partition.number: {} for partition in stream.partitions}
        for (partition, name), reply in zip(asked, replies, strict=True):
            if reply and not isinstance(reply, Refused):
                found[partition.number][name] = [parse_id(one["message_id"]) for one in reply]
        return found

    def _due(self, stream: Stream, epoch: _Epoch) -> list[int]:
        """Return the shards that may have new records."""
        ends = {shard: log.end for shard, log in epoch.logs.items()}
        begun = begun_shards(self._client, stream, epoch.manifest)
        return due_shards(epoch.manifest, begun, ends, self._looks)

    def _read(
        self, stream: Stream, number: int, epoch: _Epoch, floors: Mapping[int, EntryId | None], is_whole: bool
    ) -> dict[int, _New]:
        """Read new records. Returns shard -> what was made since the last snapshot."""
        due = self._due(stream, epoch)
        where = {shard: stream.partition_of(shard) for shard in due}
        if not epoch.is_new and not epoch.is_looked_at and not is_whole:
            found = read_backward(self._client, where, number, {shard: floors[p.number] for shard, p in where.items()})
            for shard, records in found.items():
                if records:
                    epoch.logs.setdefault(shard, ShardLog()).add(records)
            return {}
        counts = epoch.is_new or epoch.is_looked_at
        ends = {shard: epoch.logs[shard].end if shard in epoch.logs else 0 for shard in due}
        made: dict[int, _New] = {}
        for shard, records in read_forward(self._client, where, number, ends).items():
            if records:
                is_begun = shard not in epoch.logs
                found_now = epoch.logs.setdefault(shard, ShardLog()).add(records)
                if counts:
                    made[shard] = _New(found_now, is_begun)
                    self._count_made(found_now)
        return made

    def _count_made(self, found: ShardBacklog) -> None:
        self._made[0] += found.entries
        self._made[1] += found.samples
        self._made[2] += found.nbytes

    def _reread(self, stream: Stream, number: int, shard: int, log: ShardLog) -> None:
        """Read forgotten records again, because a group that joined late has not read them."""
        records = read_forward(self._client, {shard: stream.partition_of(shard)}, number, {shard: 0})[shard]
        log.restart(records)

    def _ranks(self, stream: Stream, number: int, name: str, rosters: list[Roster], sums: GroupTotals) -> _Ranks:
        """Return the positions of an ordered group. Adds its ranks to the sums."""
        manifest = self._epochs[number].manifest
        planned = manifest.samples
        record = next(roster.groups[name] for roster in rosters if name in roster.groups)
        positions = known_positions(self._client, stream, number, name)
        sums.ranks.extend(
            RankSnapshot(rank, number, at if planned is None else min(at, planned), planned)
            for rank, at in ((rank, positions.of(rank)) for rank in range(record.world))
        )
        return _Ranks(record, positions, starts_of(manifest, begun_shards(self._client, stream, manifest)))

    def _count_given(self, epoch: _Epoch, name: str, shard: int, now: ShardBacklog, new: _New | None) -> None:
        """Count what the group was given since the last snapshot.

        That is what was unread then, plus new samples, less what is unread now.
        """
        is_begun = new is not None and new.is_begun
        before = epoch.unread.get((name, shard), ShardBacklog() if is_begun else None)
        epoch.unread[name, shard] = now
        if before is not None:
            came = new.made if new is not None else ShardBacklog()
            total = self._given.setdefault(name, [0, 0])
            total[0] += max(0, before.samples + came.samples - now.samples)
            total[1] += max(0, before.nbytes + came.nbytes - now.nbytes)

    def _look_at_pending(
        self, lasts: Mapping[PartitionKeys, Mapping[str, EntryId]], number: int, reading: list[str],
        sums: dict[str, GroupTotals],
    ) -> None:  # fmt: skip
        asked = [(partition, name) for partition, at in lasts.items() for name in reading if name in at]
        if not asked:
            return
        with self._client.pipeline(transaction=False) as pipe:
            for partition, name in asked:
                pipe.xpending(partition.entries(number), name)
                pipe.xpending_range(partition.entries(number), name, "-", "+", PENDING_SEEN)
            replies = pipe.execute(raise_on_error=False)
        for (_, name), summary, oldest in zip(asked, replies[::2], replies[1::2], strict=True):
            if not isinstance(summary, Refused) and not isinstance(oldest, Refused):
                sums[name].add_pending(summary, oldest)

    # --- one group ---

    def _group(self, name: str, each: GroupTotals, rosters: list[Roster], now_ms: int) -> GroupSnapshot:
        record = next(roster.groups[name] for roster in rosters if name in roster.groups)
        known = {member: one for (group, member), one in liveness_of(rosters, now_ms).items() if group == name}
        members = tuple(
            MemberSnapshot(member, known.get(member, Liveness()), each.held.get(member, 0))
            for member in sorted({*known, *each.held})
        )
        samples, nbytes = self._given.get(name, [0, 0])
        done = tuple(sorted(epoch for group, epoch in rosters[0].closed if group == name))
        newest = max([record.read, *done])
        return GroupSnapshot(
            name=name, kind=record.kind, declared=record.declared, holds=record.holds,
            lag_entries=each.entries, lag_samples=each.samples, lag_bytes=each.nbytes,
            lag_s=0.0 if each.oldest_ms is None else max(0.0, (now_ms - each.oldest_ms) / 1000),
            pending_entries=each.pending, redelivered_entries=each.redelivered, dead_letters=each.dead,
            given_samples=samples, given_bytes=nbytes, members=members, world=record.world,
            first_epoch=record.first,
            done_epochs=done, newest_done=newest if newest >= 0 else None,
            ranks=tuple(each.ranks), lost=_lost(name, rosters),
        )  # fmt: skip


def _readers(number: int, rosters: list[Roster]) -> dict[str, bool]:
    """Return group that reads the epoch -> whether it is done with it."""
    groups = sorted({name for roster in rosters for name in roster.groups})
    return {name: (name, number) in rosters[0].closed for name in groups if _first(name, rosters) <= number}


def _first(name: str, rosters: list[Roster]) -> int:
    """Return the first epoch that the group reads. It can read no epoch that it lost in part; see join_group.lua."""
    first = 0
    for roster in rosters:
        if (record := roster.groups.get(name)) is not None:
            low, high = record.lost or (0, -1)
            lost = (epoch for epoch in roster.trimmed if low <= epoch <= high and (name, epoch) not in roster.closed)
            first = max([first, record.first, *(epoch + 1 for epoch in lost)])
    return first


def _lost(name: str, rosters: list[Roster]) -> tuple[int, int] | None:
    """Return the first and last epoch that the group lost while it held no data, or None."""
    found = [lost for roster in rosters if name in roster.groups and (lost := roster.groups[name].lost)]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def _floor(at: Mapping[str, EntryId], reading: list[str], returned: Mapping[str, list[EntryId]]) -> EntryId | None:
    """Return the entry up to which every reading group was given all, or None if no group reads."""
    below = [(ids[0][0], ids[0][1] - 1) for ids in returned.values()]
    return min([*(at.get(name, NOTHING) for name in reading), *below], default=None)


def _ordered(reading: list[str], rosters: list[Roster]) -> list[str]:
    kinds = {name: record.kind for roster in rosters for name, record in roster.groups.items()}
    return [name for name in reading if kinds[name] == ORDERED]


def _position(
    log: ShardLog, given: Mapping[str, EntryId], ranks: Mapping[str, _Ranks], shard: int, name: str
) -> int | None:
    """Return the index of the first record that the group has not read, or None if some of them were forgotten."""
    if name in ranks:
        low = ranks[name].low(shard)
        return None if low < log.floor_end else log.after_offset(low)
    at = given.get(name, NOTHING)
    return None if at < log.floor else log.after_entry(at)


def _epoch(number: int, epoch: _Epoch, rosters: list[Roster]) -> EpochSnapshot:
    manifest = epoch.manifest
    committed = sum(log.end for log in epoch.logs.values())
    read = epoch.read
    if epoch.is_finished and not epoch.logs:
        planned = manifest.samples if manifest.state == PRODUCED else None
        committed = sum(manifest.done.values()) if planned is None else planned
        read = dict.fromkeys(_readers(number, rosters), committed)
    held = sum(roster.epoch_bytes.get(number, 0) for roster in rosters)
    return EpochSnapshot(
        number, manifest.state, manifest.kind, manifest.samples, committed, epoch.bad, held, read,
        is_trimmed=any(number in roster.trimmed for roster in rosters),
        is_pinned=any(number in roster.pinned for roster in rosters),
    )  # fmt: skip


def _number(reply: object) -> int:
    return reply if isinstance(reply, int) else 0
