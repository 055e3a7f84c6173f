"""Trimmer: removes the entries of a running epoch that every group has acknowledged, from many shards at once.

``retention`` has the plan. ``cleaner`` says when bytes are needed, and releases whole epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import EpochNotFound
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import FIRST_PAGE, SHARDS_AT_ONCE, IndexRecord, index_ends, trim_entries
from penstock_common.stream.groups.ledger import bits_of_shards
from penstock_common.stream.groups.roster import ORDERED, Roster
from penstock_common.stream.index import EpochIndexes, IndexRange
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, begun_shards, load_manifest, renewed
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.streams import Stream
from penstock_producer.write.retention import plan_trim, trimming_groups

CHUNK = 250
"""Ids in one script call. It bounds how long the server is busy with the call."""
LEDGERS_AT_ONCE = 16
"""The most shards whose ledgers are read in one round trip. The first request reads one, which is mostly enough where
shards are large, and each later one reads twice as many. A ledger has up to 2^20 bits."""
FAR_S = 1.0
"""The time between two readings of the shards beyond. A writer that begins at the end of an epoch is found late."""


@dataclass(slots=True)
class _EpochMemory:
    """A memory of an epoch's shards, so that the server is not asked again."""

    manifest: Manifest
    floors: dict[int, int] = field(default_factory=dict)
    """Shard -> the offset below which every sample is known to be removed."""
    gone: dict[int, set[int]] = field(default_factory=dict)
    """Shard -> the ends of removed entries beyond the floor. They follow an entry that some group still holds."""
    over: set[int] = field(default_factory=set)
    """The complete shards whose entries are all removed."""
    begun: int = -1
    """The highest shard that is known to have entries."""
    far_s: float = float("-inf")
    """The time when the shards far beyond it were last read."""

    def see(self, ends: Mapping[int, int]) -> None:
        """Note how far shards are committed."""
        self.begun = max([self.begun, *(shard for shard, end in ends.items() if end)])

    def is_far_due(self, now_s: float) -> bool:
        """Return whether it is time to read the shards far beyond the highest begun one, and note that they are."""
        if now_s - self.far_s < FAR_S:
            return False
        self.far_s = now_s
        return True

    def note(self, shard: int, records: Iterable[IndexRecord]) -> None:
        """Raise the shard's floor over the removed ones among these records, which are the next beyond it."""
        floor, gone = self.floors.get(shard, 0), self.gone[shard]
        for record in records:
            if record.end in gone or not record.entry_id:
                floor = record.end if floor >= record.first else floor
        self.floors[shard] = floor
        gone.difference_update([end for end in gone if end <= floor])

    def end(self, shard: int) -> None:
        """Forget a complete shard whose entries are all removed."""
        manifest, floor = self.manifest, self.floors[shard]
        size = manifest.shard_size(shard) if manifest.sizes is not None else manifest.done.get(shard, floor + 1)
        if floor >= size:
            self.over.add(shard)
            del self.floors[shard], self.gone[shard]


@dataclass(slots=True)
class _AcknowledgedRanges:
    """The ranges of one shard that the groups have acknowledged."""

    bits: list[NDArray[np.bool_]]
    """The bits of each group, for the offsets from ``base`` on."""
    base: int
    upto: int
    """The offset after the last one that all of them have acknowledged."""
    read: int
    """Offset after the last record that was read."""

    def read_on(self, page: Sequence[IndexRecord]) -> None:
        """Note which records were read. Without any, all that is acknowledged was."""
        self.read = page[-1].end if page else self.upto


class Trimmer:
    """Trims epochs of one partition.

    It remembers what is gone, so a writer makes one for a partition, not one for a shard.
    """

    def __init__(
        self,
        client: Client,
        stream: Stream,
        partition: PartitionKeys,
        clock: Callable[[], float],
        confirmer: Confirmer,
    ) -> None:
        """Make a trimmer. ``confirmer`` says what is on replicas."""
        self._client, self._stream, self._partition, self._clock = client, stream, partition, clock
        self._confirmer = confirmer
        self._memories: dict[int, _EpochMemory] = {}
        self._lock = Lock()
        """A lock, because shards of one writer may be open at once, in threads."""

    def keep(self, epochs: Iterable[int]) -> None:
        """Forget all other epochs."""
        with self._lock:
            self._memories = {epoch: self._memories[epoch] for epoch in epochs if epoch in self._memories}

    def trim(self, roster: Roster, epoch: int, need: int, *, leaves_neighbours: bool = False) -> int:
        """Remove acknowledged entries of the epoch until ``need`` bytes are free. Return the bytes freed.

        With ``leaves_neighbours`` an entry stays if its neighbour goes; see `plan_trim`.
        """
        with self._lock:
            return self._trim(roster, epoch, need, leaves_neighbours)

    def _trim(self, roster: Roster, epoch: int, need: int, leaves_neighbours: bool) -> int:
        groups = trimming_groups(roster, epoch)
        memory = self._renewed(epoch) if groups else None
        if memory is None:
            return 0
        todo, freed = self._worth_asking(memory), 0
        for start in range(0, len(todo), SHARDS_AT_ONCE):
            ends = index_ends(self._client, self._stream, epoch, todo[start : start + SHARDS_AT_ONCE])
            memory.see(ends)
            left = [shard for shard, end in ends.items() if memory.floors.get(shard, 0) < end]
            for some in _portions(left):
                if freed >= need:
                    return freed
                part = {shard: ends[shard] for shard in some}
                freed += self._trim_shards(roster, groups, memory, part, need - freed, leaves_neighbours)
        return freed

    def _renewed(self, epoch: int) -> _EpochMemory | None:
        """Return what is known of the epoch, with its manifest as it is now; None if it is gone."""
        memory = self._memories.get(epoch)
        try:
            if memory is None:
                memory = self._memories[epoch] = _EpochMemory(load_manifest(self._client, self._stream, epoch))
            else:
                manifest = renewed(self._client, self._stream, memory.manifest)
                memory = self._memories[epoch] = replace(memory, manifest=manifest)
        except EpochNotFound:
            return None
        return memory

    def _worth_asking(self, memory: _EpochMemory) -> list[int]:
        """Return the shards of this partition that may have something to remove, in order."""
        begun, every = begun_shards(self._client, self._stream, memory.manifest), len(self._stream.partitions)
        mine = [shard for shard in begun[self._partition.number :: every] if shard not in memory.over]
        if memory.is_far_due(self._clock()):
            return mine
        return [shard for shard in mine if shard <= memory.begun + SHARDS_AT_ONCE * every]

    def _trim_shards(
        self,
        roster: Roster,
        groups: list[str],
        memory: _EpochMemory,
        ends: Mapping[int, int],
        need: int,
        leaves_neighbours: bool,
    ) -> int:
        """Remove acknowledged entries of some shards, the lowest first, a page at a time."""
        epoch, freed, size = memory.manifest.epoch, 0, FIRST_PAGE
        positions = self._confirmer.question(self._positions_elsewhere(roster, groups))
        todo = self._acknowledged(roster, groups, memory, ends)
        if todo and not positions.is_answered():
            return 0
        indexes = EpochIndexes(self._client, self._stream, epoch)
        for shard in todo:
            memory.gone.setdefault(shard, set())
        before = {shard: set(memory.gone[shard]) for shard in todo} if leaves_neighbours else {}
        while todo and freed < need:
            found = indexes.read([IndexRange(shard, one.read, size) for shard, one in todo.items()]).records
            pages = dict(zip(todo, found, strict=True))
            while freed < need and (plan := _plan(pages, todo, memory.gone, need - freed, before)):
                removed = [record for _, record in plan]
                now = trim_entries(self._client, self._partition, roster.generation, epoch, removed)
                if now is None:  # a group joined since the plan, so nothing was removed
                    return freed
                freed += now  # less than planned if other writers removed some of it
                for shard, record in plan:
                    memory.gone[shard].add(record.end)
            for shard, page in pages.items():
                memory.note(shard, page)
                todo[shard].read_on(page)
            for shard in [s for s, one in todo.items() if len(pages[s]) < size or one.read >= one.upto]:
                memory.end(shard)
                del todo[shard]
            size = min(2 * size, CHUNK)
        return freed

    def _positions_elsewhere(self, roster: Roster, groups: Iterable[str]) -> list[PartitionKeys]:
        """Return the partition with the positions of these groups, if another server has it than the entries."""
        first = self._stream.partitions[0]
        is_ordered = any(roster.groups[group].kind == ORDERED for group in groups)
        return [first] if is_ordered and self._confirmer.are_apart(first, self._partition) else []

    def _acknowledged(
        self, roster: Roster, groups: list[str], memory: _EpochMemory, ends: Mapping[int, int]
    ) -> dict[int, _AcknowledgedRanges]:
        """Return the shards in which every group has acknowledged something."""
        spans = {shard: (memory.floors.get(shard, 0), end) for shard, end in ends.items()}
        by_group = [
            bits_of_shards(self._client, self._stream, memory.manifest, group, roster.groups[group], spans, may_go=True)
            for group in groups
        ]
        found = {}
        for shard, (floor, _) in spans.items():
            bits = [one[shard] for one in by_group]
            acknowledged = np.flatnonzero(np.logical_and.reduce(bits))
            if len(acknowledged):
                # an entry that ends later is not acknowledged, or ends in holes and waits for the next pass
                found[shard] = _AcknowledgedRanges(bits, floor, floor + int(acknowledged[-1]) + 1, floor)
        return found


def _portions(shards: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield one shard, then larger and larger portions."""
    start, size = 0, 1
    while start < len(shards):
        yield shards[start : start + size]
        start, size = start + size, min(2 * size, LEDGERS_AT_ONCE)


def _plan(
    pages: Mapping[int, list[IndexRecord]],
    todo: Mapping[int, _AcknowledgedRanges],
    gone: Mapping[int, set[int]],
    need: int,
    before: Mapping[int, set[int]],
) -> list[tuple[int, IndexRecord]]:
    """Return (shard, record) of entries that may be removed until ``need_bytes`` are free, as many as fit one script.

    If ``before`` has what was gone before this call, an entry stays if its neighbour goes.
    """
    plan: list[tuple[int, IndexRecord]] = []
    for shard, page in pages.items():
        one, missing = todo[shard], need - sum(record.nbytes for _, record in plan)
        within = [record for record in page if record.end <= one.upto]
        found = plan_trim(within, one.bits, missing, one.base, gone=gone[shard], gone_before=before.get(shard))
        plan += [(shard, record) for record in found]
    return plan[:CHUNK]
