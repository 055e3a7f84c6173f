"""A wait that closes on itself: a writer waits for room, and all who could make it wait for that writer's samples.

Found from what every member says of itself on the roster, and from ids and index records; never from payloads. What
follows from it is ``overdue``'s. Asked only when a wait has lasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import Record, index_ends, index_records, list_pending
from penstock_common.stream.groups.ledger import group_bits
from penstock_common.stream.groups.positions import kept_head, settled_below, starts_of
from penstock_common.stream.groups.roster import ORDERED, GroupRecord, Roster, server_ms
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import (
    ABANDONED,
    PRODUCED,
    Manifest,
    begun_shards,
    find_manifest,
    retained_epochs,
)
from penstock_common.stream.streams import Stream

LIVING_MS = 10_000
"""A member unseen for so long is dead, or stands still: what it holds goes to others."""
IDLE_MS = 5_000
"""A loop that waited so long for a batch has nothing else to do."""

Who = tuple[str, str]
"""(group, member)."""


@dataclass(frozen=True, slots=True)
class Circle:
    """Everyone who reads one partition, where all of them wait."""

    freed_bytes: int
    """Payload bytes that would go if each settled all it was given."""
    handed: Mapping[Who, int]
    """What the loops were given and have not settled, bytes: of those who have anything."""
    held: Mapping[Who, int]
    """What else their readers hold, bytes: parts of batches that are not full, and what was read ahead."""

    @property
    def told(self) -> Who | None:
        """Who is to be told: whose loop has most in hand, or, where no loop has anything, whose reader has."""
        most = self.handed or self.held
        return max(most, key=lambda who: (most[who], who), default=None)


def find_circle(client: Client, stream: Stream, partition: PartitionKeys, roster: Roster) -> Circle | None:
    """None where somebody is at work, or something is about to change hands."""
    now = server_ms(client)
    living = {who for who, seen in roster.members.items() if now - seen <= LIVING_MS}
    if any(who not in roster.idle or now - roster.idle[who].since_ms < IDLE_MS for who in living):
        return None
    kept = roster.pinned | {epoch for epoch, _ in roster.replays.values()}
    freed, held = 0, Counter[Who]()
    for epoch in roster.epochs:
        manifest = find_manifest(client, stream, epoch)
        if manifest is None:
            continue
        hands = _Hands(client, stream, partition, roster, manifest, living)
        if not hands.are_sure:
            return None
        freed += 0 if epoch in kept else hands.freed()
        held += hands.held
    return Circle(freed, {who: roster.idle[who].handed_bytes for who in living if roster.idle[who].handed_bytes}, held)


def is_stuck(client: Client, stream: Stream, rosters: Mapping[PartitionKeys, Roster]) -> bool:
    """Whether no samples can come: in each partition that lacks some, the writer of the lowest shard waits for room.

    Where one does not wait it is at work, or its shard lies in a queue, or with a worker that died: that will be made,
    and until then nobody knows whether there is room.
    """
    lacking: set[PartitionKeys] = set()
    for epoch, state in retained_epochs(client, stream).items():
        manifest = None if state in (PRODUCED, ABANDONED) else find_manifest(client, stream, epoch)
        if manifest is not None:
            shards = begun_shards(client, stream, manifest)
            lacking |= {stream.partition_of(shard) for shard in shards if shard not in manifest.done}
    stuck = {at for at, roster in rosters.items() if any(waiter.is_next for waiter in roster.waiting.values())}
    return lacking <= stuck


class _Hands:
    """What the living have of one epoch's part in a partition."""

    def __init__(
        self, client: Client, stream: Stream, partition: PartitionKeys, roster: Roster, manifest: Manifest,
        living: set[Who],
    ) -> None:  # fmt: skip
        self._client, self._stream, self._partition, self._manifest = client, stream, partition, manifest
        epoch = manifest.epoch
        self._groups = {
            name: record
            for name, record in roster.groups.items()
            if record.holds and record.first <= epoch and (name, epoch) not in roster.closed
        }
        pending = {
            name: {entry.entry_id: entry.member for entry in list_pending(client, partition, epoch, name)}
            for name, record in self._groups.items()
            if record.kind != ORDERED
        }
        self.are_sure = all((name, member) in living for name, ids in pending.items() for member in ids.values())
        """Whether nothing lies with the dead, or was handed back: somebody is about to take that."""
        self._pending = pending
        self._reached = {
            name: self._end_of_steps(record) if any(group == name for group, _ in living) else 0
            for name, record in self._groups.items()
            if record.kind == ORDERED
        }
        self.held = Counter[Who]()

    def freed(self) -> int:
        """Payload bytes of the entries that every group would have settled then, and has not now."""
        shards = begun_shards(self._client, self._stream, self._manifest)
        starts = starts_of(self._manifest, shards)
        mine = (shard for shard in shards if self._stream.partition_of(shard) == self._partition)
        return sum(self._freed_of(shard, starts.get(shard)) for shard in mine)

    def _freed_of(self, shard: int, start: int | None) -> int:
        records = list(index_records(self._client, self._partition, self._manifest.epoch, shard))
        end = max((record.end for record in records), default=0)
        now, then = np.ones(end, dtype=bool), np.ones(end, dtype=bool)
        for name, group in self._groups.items():
            bits = group_bits(self._client, self._stream, self._manifest, name, group, shard, 0, end, may_go=True)
            now &= bits
            then &= bits | self._in_hand(name, group, start, records, end)
        for record in records:
            now[list(record.holes)] = then[list(record.holes)] = True
        spans = [(slice(record.first, record.end), record.nbytes) for record in records]
        return sum(nbytes for span, nbytes in spans if then[span].all() and not now[span].all())

    def _in_hand(
        self, name: str, group: GroupRecord, start: int | None, records: list[Record], end: int
    ) -> NDArray[np.bool_]:
        """What the members of a group were given."""
        if name in self._reached:
            reached = settled_below(self._reached[name], start, 0, end)
            return reached & ~settled_below(kept_head(group), start, 0, end)
        bits, pending = np.zeros(end, dtype=bool), self._pending[name]
        for record in records:
            if record.entry_id in pending:
                bits[record.first : record.end] = True
                self.held[name, pending[record.entry_id]] += record.nbytes
        return bits

    def _end_of_steps(self, group: GroupRecord) -> int:
        """The end of the last whole step of an ordered group that is committed: its ranks wait for the next one."""
        at = 0
        shards = begun_shards(self._client, self._stream, self._manifest)
        ends = {
            shard: end
            for partition in self._stream.partitions
            for shard, end in index_ends(
                self._client, partition, self._manifest.epoch,
                [shard for shard in shards if self._stream.partition_of(shard) == partition],
            ).items()
        }  # fmt: skip
        for shard, start in starts_of(self._manifest, self._manifest.shards()).items():
            at = start + ends.get(shard, 0)
            if ends.get(shard, 0) < self._manifest.shard_size(shard):
                break
        step = max(1, group.world * group.batch)
        return at // step * step
