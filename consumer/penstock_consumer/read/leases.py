"""The entries that a member holds, and the rule for taking over those of others. No Redis, no clock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_common.stream.entries import PendingEntry
from penstock_common.stream.groups.losses import AcknowledgedSamples
from penstock_common.stream.keys import RELEASED
from penstock_consumer.stages.batch import Batch, Lease

REMEMBERED = 64
"""Acknowledgements remembered after they were sent: more than can be unanswered at once."""


@dataclass(slots=True)
class AckRequest:
    """The arguments of one acknowledging script call: one partition of one epoch."""

    ids: list[bytes] = field(default_factory=list)
    """The entries whose last samples this call acknowledges."""
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Shard -> offsets [lo, hi), in any order. They may overlap."""
    entries: list[AcknowledgedSamples] = field(default_factory=list)
    """The samples of each entry that it acknowledges."""


def acknowledged_entries(batch: Batch) -> list[AcknowledgedSamples]:
    """Return the samples of each entry that a batch acknowledges. A shuffled batch has many spans of few entries."""
    return [_acknowledged(lease, ranges) for lease, ranges in _by_lease(batch).items()]


def _acknowledged(lease: Lease, ranges: list[tuple[int, int]]) -> AcknowledgedSamples:
    samples = 0
    for lo, hi in ranges:
        samples += hi - lo
    return AcknowledgedSamples(lease, min(ranges)[0], max(ranges)[1], samples)


def _by_lease(batch: Batch) -> dict[Lease, list[tuple[int, int]]]:
    found: dict[Lease, list[tuple[int, int]]] = {}
    for lease, lo, hi in batch.spans:
        found.setdefault(lease, []).append((lo, hi))
    return found


def plan_acknowledgement(batch: Batch) -> dict[int, AckRequest]:
    """Return, by partition, what acknowledges a batch. This counts leases down, so call it once for each batch."""
    plan: dict[int, AckRequest] = {}
    for delivered, ranges in _by_lease(batch).items():
        lease = delivered.current()
        due = plan.setdefault(lease.partition, AckRequest())
        due.ranges.setdefault(lease.shard, []).extend(ranges)
        due.entries.append(done := _acknowledged(lease, ranges))
        if lease.unacknowledged == done.samples:
            due.ids.append(lease.entry_id)
            # and what was acknowledged of it before, here or by others: a server may have lost those bits alone
            due.ranges[lease.shard] += lease.acknowledged
        lease.acknowledge(ranges, done.samples)
    return plan


class Leases:
    """All leases of this member, shared by its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[tuple[int, int], dict[bytes, Lease]] = {}
        """(partition, epoch) -> entry id -> lease."""
        self._acknowledging: deque[tuple[int, int, frozenset[bytes]]] = deque(maxlen=REMEMBERED)

    def add(self, lease: Lease) -> None:
        """Add the lease of an entry that was received. An earlier lease of the entry is lost."""
        with self._lock:
            held = self._leases.setdefault((lease.partition, lease.epoch), {})
            if (former := held.get(lease.entry_id)) is not None:
                former.lose()
                if former.kept:
                    lease.inherit(former.unacknowledged - 1)
                    former.leave_to(lease)
            held[lease.entry_id] = lease

    def remove(self, partition: int, epoch: int, ids: list[bytes]) -> None:
        """Remove entries that are acknowledged, though the server may not have answered yet."""
        if not ids:  # usual where an entry is several batches
            return
        with self._lock:
            self._acknowledging.append((partition, epoch, frozenset(ids)))
            held = self._leases.get((partition, epoch), {})
            for entry_id in ids:
                held.pop(entry_id, None)
            if not held:
                self._leases.pop((partition, epoch), None)

    def lose(self, partition: int, epoch: int, ids: list[bytes]) -> int:
        """Note that another member holds these entries now. Return how many of them were still held here."""
        with self._lock:
            held = self._leases.get((partition, epoch), {})
            found = [lease for entry_id in ids if (lease := held.pop(entry_id, None)) is not None]
            lost = [lease for lease in found if lease.unacknowledged]  # the others' acknowledgement is just under way
            for lease in lost:
                lease.lose()
            return len(lost)

    def hold_again(self, lease: Lease, kept: list[tuple[int, int]]) -> None:
        """Hold an entry that was dropped until it is received again, less what of it waits for a checkpoint."""
        # one more than is kept, so that the entry is not acknowledged before it is received again; see `add`
        unacknowledged = sum(hi - lo for lo, hi in kept) + 1 if kept else 0
        held = Lease(lease.partition, lease.epoch, lease.shard, lease.entry_id, unacknowledged, kept=kept)
        if kept:
            lease.leave_to(held)
        self.add(held)

    def kept(self, partition: int, epoch: int, shard: int) -> list[tuple[int, int]]:
        """Return the offsets of a shard that the loop has and has not acknowledged. It must not get them again."""
        with self._lock:
            held = self._leases.get((partition, epoch), {})
            return [span for lease in held.values() if lease.shard == shard for span in lease.kept]

    def drop(self, lease: Lease) -> bool:
        """Drop a lease, so that its entry can be received again. Return False if it is acknowledged or lost already."""
        with self._lock:
            held = self._leases.get((lease.partition, lease.epoch), {})
            if held.get(lease.entry_id) is not lease:
                return False
            del held[lease.entry_id]
            lease.lose()
            return True

    def of(self, epoch: int) -> list[Lease]:
        """Return the leases of an epoch."""
        with self._lock:
            return [lease for (_, e), held in self._leases.items() if e == epoch for lease in held.values()]

    def holds_epoch(self, epoch: int) -> bool:
        """Return whether anything of an epoch is held."""
        with self._lock:
            return any(held for (_, e), held in self._leases.items() if e == epoch)

    def ids(self, partition: int) -> dict[int, list[bytes]]:
        """Return the ids held in one partition, by epoch."""
        with self._lock:
            return {epoch: list(held) for (p, epoch), held in self._leases.items() if p == partition and held}

    def to_renew(self, partition: int) -> dict[int, list[bytes]]:
        """Return `ids` and what was acknowledged just now.

        A connection may have broken before the server heard of it.
        """
        found = self.ids(partition)
        with self._lock:
            for number, epoch, acknowledging in self._acknowledging:
                if number == partition:
                    found.setdefault(epoch, []).extend(acknowledging)
        return found

    def shards(self, partition: int) -> dict[tuple[int, int], set[bytes]]:
        """Return the ids held in one partition, by (epoch, shard). A claimed entry has shard -1 until it is fetched."""
        found: dict[tuple[int, int], set[bytes]] = {}
        with self._lock:
            for (number, epoch), held in self._leases.items():
                if number == partition:
                    for entry_id, lease in held.items():
                        found.setdefault((epoch, lease.shard), set()).add(entry_id)
        return found

    def holds(self, partition: int, epoch: int, entry_id: bytes) -> bool:
        """Return whether this member tracks the entry."""
        with self._lock:
            return entry_id in self._leases.get((partition, epoch), {})

    def is_acknowledging(self, partition: int, epoch: int, entry_id: bytes) -> bool:
        """Return whether the entry was acknowledged so recently that it may still be pending on the server."""
        with self._lock:
            return any((p, e) == (partition, epoch) and entry_id in ids for p, e, ids in self._acknowledging)


RENEWED_BELOW = 0.5
"""An idle time that grew by less than this part of the time between two looks was reset in between."""


@dataclass(frozen=True, slots=True)
class LeaseSighting:
    """An entry as last seen, and since when it has been seen unrenewed."""

    holder: str
    idle_ms: int
    at_s: float
    since_s: float


Key = tuple[int, int, bytes]
"""(partition, epoch, entry id)."""


def plan_reclaim(
    seen: dict[Key, LeaseSighting], pending: Iterable[tuple[Key, PendingEntry]], me: str, now_s: float, lease_s: float
) -> tuple[dict[Key, LeaseSighting], list[tuple[Key, PendingEntry]]]:
    """Return what to remember for the next look, and what to claim now, of all that is pending in the group."""
    remembered: dict[Key, LeaseSighting] = {}
    claims: list[tuple[Key, PendingEntry]] = []
    for key, entry in pending:
        if entry.member == me:
            continue
        # 1. returned on purpose: free for any member at once
        if entry.member == RELEASED:
            claims.append((key, entry))
            continue
        # 2. a new sighting, another holder, or one that renewed: the lease starts again on this clock
        before = seen.get(key)
        since = now_s
        if before is not None and before.holder == entry.member and not _was_renewed(before, entry, now_s):
            since = before.since_s
        # 3. unrenewed for a whole lease
        if now_s - since >= lease_s:
            claims.append((key, entry))
            continue
        remembered[key] = LeaseSighting(entry.member, entry.idle_ms, now_s, since)
    return remembered, claims


def _was_renewed(before: LeaseSighting, entry: PendingEntry, now_s: float) -> bool:
    elapsed_ms = (now_s - before.at_s) * 1000
    return entry.idle_ms < before.idle_ms + elapsed_ms * RENEWED_BELOW
