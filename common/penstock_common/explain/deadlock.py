"""The test whether a training job waits for itself: writers wait for space that unacknowledged batches take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import CheckpointOverdue, TooLarge
from penstock_common.explain.backlog import GroupBacklog, hold_of
from penstock_common.printable import readable_bytes
from penstock_common.stream.commands import Client, server_ms
from penstock_common.stream.entries import IndexRecord, index_ends, index_records, list_pending
from penstock_common.stream.groups.ledger import group_bits, unacknowledged_samples
from penstock_common.stream.groups.positions import HEAD_STEPS, done_below, kept_head, starts_of
from penstock_common.stream.groups.presence import MEMBER_SILENT_MS, liveness_of
from penstock_common.stream.groups.roster import ORDERED, GroupRecord, Roster, WaitingWriter, load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import (
    ABANDONED,
    PRODUCED,
    Manifest,
    begun_shards,
    find_manifest,
    retained_epochs,
)
from penstock_common.stream.servers.suitability import step_too_large
from penstock_common.stream.streams import Stream, read_budget

IDLE_MS = 5_000
"""A loop that has waited this long for a batch has no other work."""

Who = tuple[str, str]
"""(group, member)."""


class Releasable(NamedTuple):
    """The payload bytes of a partition, by what becomes of them if readers acknowledge everything they were given."""

    freed_bytes: int = 0
    """Bytes that would be freed."""
    stay_bytes: int = 0
    """Bytes that stay, whatever the readers acknowledge."""
    ordered_bytes: int = 0
    """The part of them that stays for a group in canonical order. It waits for the rest of a step, or needs the start
    of an epoch for its last step.
    """
    written_bytes: int = 0
    """Bytes that were written into the epochs that are read."""
    samples: int = 0
    """The samples in them."""

    def plus(self, other: Releasable) -> Releasable:
        """Return the sums."""
        return Releasable(*map(add, self, other))

    @property
    def sample_bytes(self) -> int:
        """The mean payload bytes of a sample."""
        return self.written_bytes // max(1, self.samples)


@dataclass(frozen=True, slots=True)
class Deadlock:
    """The holdings of all readers of a partition, while every one of them waits."""

    releasable: Releasable
    """What acknowledging would free."""
    handed: Mapping[Who, int]
    """The bytes that each loop was given and has not acknowledged, for the loops that have any."""
    held: Mapping[Who, int]
    """The other bytes that each reader holds: parts of batches that are not full, and what was read ahead."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Group in canonical order whose next step lacks samples of this partition -> the samples of its step."""

    @property
    def chosen(self) -> Who | None:
        """Return the member that raises the error: the one whose loop holds most.

        If no loop holds anything, it is the one whose reader holds most.
        """
        most = self.handed or self.held
        return max(most, key=lambda who: (most[who], who), default=None)


def find_deadlock(client: Client, stream: Stream, partition: PartitionKeys, roster: Roster) -> Deadlock | None:
    """Return the deadlock of a partition, or None if a reader is at work, or an entry is about to change its owner.

    A member with a late heartbeat is unknown, because its last report may predate an outage.
    """
    now = server_ms(client, partition.roster)
    seen = {who: liveness for who, liveness in liveness_of([roster], now).items() if not liveness.is_silent}
    if any(liveness.unseen_ms is None or liveness.unseen_ms > MEMBER_SILENT_MS for liveness in seen.values()):
        return None
    live = set(seen)
    if any(who not in roster.idle or now - roster.idle[who].since_ms < IDLE_MS for who in live):
        return None
    kept = roster.pinned | {epoch for epoch, _ in roster.replays.values()}
    releasable, held, steps = Releasable(), Counter[Who](), dict[str, int]()
    for epoch in roster.epochs:
        manifest = find_manifest(client, stream, epoch)
        if manifest is None:
            continue
        holdings = _MemberHoldings(client, stream, partition, roster, manifest, live)
        if not holdings.are_all_live:
            return None
        if epoch in kept:
            releasable = releasable.plus(Releasable(stay_bytes=roster.epoch_bytes.get(epoch, 0)))
            continue
        releasable = releasable.plus(holdings.releasable())
        held += holdings.held
        steps |= holdings.steps
    handed = {who: roster.idle[who].handed_bytes for who in live if roster.idle[who].handed_bytes}
    return Deadlock(releasable, handed, held, steps)


def is_stuck(client: Client, stream: Stream, rosters: Mapping[PartitionKeys, Roster]) -> bool:
    """Return whether no samples can come: in each unfinished partition, the writer of the lowest shard waits.

    A lowest shard whose writer does not wait is being made, or is in a queue, or lost its worker and will be made
    again. Whether there is space for it is not known before that.
    """
    lacking: set[PartitionKeys] = set()
    for epoch, state in retained_epochs(client, stream).items():
        manifest = None if state in (PRODUCED, ABANDONED) else find_manifest(client, stream, epoch)
        if manifest is not None:
            shards = begun_shards(client, stream, manifest)
            lacking |= {stream.partition_of(shard) for shard in shards if shard not in manifest.done}
    stuck = {at for at, roster in rosters.items() if any(waiter.is_next for waiter in roster.waiting.values())}
    return lacking <= stuck


def find_blocked(
    client: Client, stream: Stream, me: Who, held_bytes: Callable[[PartitionKeys], int], *, together: bool
) -> list[BlockedPartition]:
    """Return the partitions where writers wait for quota, and what one member holds there.

    Args:
        client: client of the stream's server.
        stream: the stream.
        me: group and name of the member.
        held_bytes: returns the payload bytes that the member holds in a partition. It is called only if writers wait.
        together: whether to read the holdings of all other readers, too.
    """
    rosters = {partition: load_roster(client, partition) for partition in stream.partitions}
    if not any(roster.waiting for roster in rosters.values()) or not _are_settled(rosters.values(), me):
        return []
    if not is_stuck(client, stream, rosters):
        return []
    budget_bytes = read_budget(client, stream) // len(stream.partitions)
    return [
        BlockedPartition(
            tuple(roster.waiting.values()),
            mine_bytes=held_bytes(partition),
            budget_bytes=budget_bytes,
            has_others=_have_others(client, stream, partition, roster, me),
            group=hold_of(client, stream, partition, roster, me[0], with_freed=True) if together else None,
            deadlock=find_deadlock(client, stream, partition, roster) if together else None,
            me=me,
        )
        for partition, roster in rosters.items()
        if roster.waiting
    ]


def _are_settled(rosters: Collection[Roster], me: Who) -> bool:
    """Return whether all rosters know the same groups, and this member.

    A server that came back older has lost some of them until they join again, and with them who holds what.
    """
    return len({frozenset(roster.groups) for roster in rosters}) == 1 and all(me in one.members for one in rosters)


def _have_others(client: Client, stream: Stream, partition: PartitionKeys, roster: Roster, me: Who) -> bool:
    """Return whether another group, member or replay holds something in a partition."""
    if roster.replays:
        return True
    group, member = me
    for epoch in roster.epochs:
        if any(entry.member != member for entry in list_pending(client, partition, epoch, group)):
            return True
        others = {name: record for name, record in roster.unacknowledged_by(epoch).items() if name != group}
        manifest = find_manifest(client, stream, epoch) if others else None
        if manifest is not None and any(unacknowledged_samples(client, stream, manifest, others).values()):
            return True
    return False


class _MemberHoldings:
    """The entries of one epoch and partition that live members have."""

    def __init__(
        self, client: Client, stream: Stream, partition: PartitionKeys, roster: Roster, manifest: Manifest,
        live: set[Who],
    ) -> None:  # fmt: skip
        self._client, self._stream, self._partition, self._manifest = client, stream, partition, manifest
        epoch = manifest.epoch
        self._groups = roster.unacknowledged_by(epoch)
        pending = {
            name: {entry.entry_id: entry.member for entry in list_pending(client, partition, epoch, name)}
            for name, record in self._groups.items()
            if record.kind != ORDERED
        }
        self.are_all_live = all((name, member) in live for name, ids in pending.items() for member in ids.values())
        """Whether a live member holds each entry. Another member will soon take an entry of a dead one, or a returned
        one.
        """
        self._pending = pending
        self._live_groups = live_groups = {group for group, _ in live}
        ordered = [name for name, record in self._groups.items() if record.kind == ORDERED]
        end, awaited = self._end_of_committed() if ordered else (0, None)
        steps = {name: max(1, self._groups[name].world * self._groups[name].batch) for name in ordered}
        self._reached = {name: end // step * step if name in live_groups else 0 for name, step in steps.items()}
        """Ordered group -> the end of the last whole committed step, if ranks wait for the next one."""
        is_here = awaited is not None and stream.partition_of(awaited) == partition
        self.steps = {name: step for name, step in steps.items() if is_here and name in live_groups}
        """See Deadlock."""
        self.held = Counter[Who]()

    def releasable(self) -> Releasable:
        """Return what would be freed if all members acknowledged what they were given.

        It also adds to `held` what each member of a shared group was given.
        """
        shards = begun_shards(self._client, self._stream, self._manifest)
        starts = starts_of(self._manifest, shards)
        mine = (shard for shard in shards if self._stream.partition_of(shard) == self._partition)
        return reduce(Releasable.plus, (self._releasable_of(shard, starts.get(shard)) for shard in mine), Releasable())

    def _releasable_of(self, shard: int, start: int | None) -> Releasable:
        records = list(index_records(self._client, self._partition, self._manifest.epoch, shard))
        end = max((record.end for record in records), default=0)
        now, then, besides = np.ones(end, dtype=bool), np.ones(end, dtype=bool), np.ones(end, dtype=bool)
        for name, group in self._groups.items():
            bits = group_bits(self._client, self._stream, self._manifest, name, group, shard, 0, end, may_go=True)
            now &= bits
            later = bits | self._in_hand(name, group, start, records, end)
            then &= later
            if not self._reads_in_order(name):
                besides &= later
        for record in records:
            now[list(record.holes)] = then[list(record.holes)] = besides[list(record.holes)] = True
        spans = [(slice(record.first, record.end), record.nbytes) for record in records]
        return Releasable(
            freed_bytes=sum(nbytes for span, nbytes in spans if then[span].all() and not now[span].all()),
            stay_bytes=sum(nbytes for span, nbytes in spans if not then[span].all()),
            ordered_bytes=sum(nbytes for span, nbytes in spans if besides[span].all() and not then[span].all()),
            written_bytes=sum(record.nbytes for record in records),
            samples=sum(record.count for record in records),
        )

    def _reads_in_order(self, group: str) -> bool:
        return group in self._reached and group in self._live_groups

    def _in_hand(
        self, name: str, group: GroupRecord, start: int | None, records: list[IndexRecord], end: int
    ) -> NDArray[np.bool_]:
        """Return a bit for each sample that the members of a group were given."""
        if name in self._reached:
            reached = done_below(self._reached[name], start, 0, end)
            return reached & ~done_below(kept_head(group), start, 0, end)
        bits, pending = np.zeros(end, dtype=bool), self._pending[name]
        for record in records:
            if record.entry_id in pending:
                bits[record.first : record.end] = True
                self.held[name, pending[record.entry_id]] += record.nbytes
        return bits

    def _end_of_committed(self) -> tuple[int, int | None]:
        """Return the position up to which all is committed, and the shard that has the next one, if there is one."""
        at = 0
        shards = begun_shards(self._client, self._stream, self._manifest)
        ends = index_ends(self._client, self._stream, self._manifest.epoch, shards)
        for shard, start in starts_of(self._manifest, shards).items():
            at = start + ends.get(shard, 0)
            if ends.get(shard, 0) < self._manifest.shard_size(shard):
                return at, shard
        return at, len(shards) if self._manifest.sizes is None else None


WARN_SHARE = 0.5
"""The share of the budget above which unacknowledged batches cause a warning, while there is still space."""
PATIENCE_S = 3.0
"""A loop that has waited this long for a batch will wait for ever, if only the loop itself can acknowledge anything."""
OTHER_THREAD_S = 30.0
"""`PATIENCE_S` if another thread may be about to acknowledge (a framework's step, a saved checkpoint, 'manual')."""
SETTLED_MS = 1500
"""A writer that has waited this long has seen what the cleaner can free."""


class OutstandingAmount(NamedTuple):
    """The amount that was yielded and is not acknowledged."""

    batches: int = 0
    samples: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockedPartition:
    """A partition with writers that wait for quota, as one member of one group sees it."""

    waiters: Sequence[WaitingWriter]
    mine_bytes: int
    """Payload bytes of the entries that this member holds. An entry is freed only as a whole."""
    budget_bytes: int
    """The budget of the partition."""
    has_others: bool
    """Whether another member, group or replay holds something, too."""
    group: GroupBacklog | None = None
    """The holdings of all members of this group. They are read only after a long wait."""
    deadlock: Deadlock | None = None
    """The holdings of all readers of the partition, if all of them wait. They are read only after a long wait."""
    me: Who = ("", "")


def is_overdue(blocked: BlockedPartition) -> bool:
    """Return whether only this member's acknowledgement can let the awaited writer continue.

    Only the writer of the lowest unfinished shard counts, because the other writers wait for it.
    """
    for waiter in blocked.waiters:
        if not waiter.is_next or waiter.why == "folder" or waiter.seen_ms - waiter.since_ms < SETTLED_MS:
            continue  # other programs fill the folder's disk, too, and a larger budget does not help
        # 1. what this member holds would block the writer even if all others freed what they hold
        if blocked.mine_bytes + waiter.need_bytes > blocked.budget_bytes:
            return True
        # 2. no other reader holds anything, and acknowledging frees enough
        if not blocked.has_others and blocked.mine_bytes >= waiter.need_bytes:
            return True
    return False


def is_group_overdue(blocked: BlockedPartition) -> bool:
    """Return whether this group's members together block the awaited writer, and this one holds at least the mean.

    Another member may only be slow, so this is for long waits. Where all members wait for each other, those that hold
    most raise the error.
    """
    group = blocked.group
    if group is None or not blocked.mine_bytes or blocked.mine_bytes * group.members < group.nbytes:
        return False
    return _is_enough(blocked, group.freed_bytes)


def is_deadlock(blocked: BlockedPartition) -> bool:
    """Return whether all readers of the partition wait for space that they hold, and this one must raise the error.

    No other process can end such a wait, so even a short wait is certain. All callers find the same member.
    """
    deadlock = blocked.deadlock
    if deadlock is None or deadlock.chosen != blocked.me:
        return False
    return _is_enough(blocked, deadlock.releasable.freed_bytes)


def is_step_too_large(blocked: BlockedPartition) -> bool:
    """Return whether this group's next step in canonical order can never be committed as a whole.

    All readers of the partition wait, and whatever they acknowledge, the samples that the steps of such groups need
    leave no space for the block that comes next. Each rank of the group with the largest step raises the error, because
    none of them can go on.
    """
    deadlock = blocked.deadlock
    if deadlock is None or deadlock.steps.get(blocked.me[0], 0) < max(deadlock.steps.values(), default=1):
        return False
    stay_bytes = deadlock.releasable.stay_bytes
    others_bytes = stay_bytes - deadlock.releasable.ordered_bytes
    return any(others_bytes <= blocked.budget_bytes - one.need_bytes < stay_bytes for one in _due(blocked))


def _due(blocked: BlockedPartition) -> Iterator[WaitingWriter]:
    """Yield the awaited writer if it waits for budget, and has seen what the cleaner can free."""
    for waiter in blocked.waiters:
        if waiter.is_next and waiter.why == "budget" and waiter.seen_ms - waiter.since_ms >= SETTLED_MS:
            yield waiter


def _is_enough(blocked: BlockedPartition, freed_bytes: int) -> bool:
    """Return whether the awaited writer waits for budget, and could write if this much more were free."""
    return any(0 < one.held_bytes + one.need_bytes - blocked.budget_bytes <= freed_bytes for one in _due(blocked))


def warning(held: OutstandingAmount, budget_bytes: int, stream: str, remedy: str) -> str | None:
    """Return a warning about batches that are not acknowledged, or None while they are few."""
    if held.nbytes <= WARN_SHARE * budget_bytes:
        return None
    return f"{_numbers(held, budget_bytes, stream)}: writers will soon have to wait for it; {remedy}"


def overdue(
    blocked_partitions: Iterable[BlockedPartition], held: OutstandingAmount, stream: Stream, remedy: str
) -> CheckpointOverdue | TooLarge | None:
    """Return the error to raise in a loop that waits for a batch.

    Returns None if other readers hold the space, or if no writer waits for it.
    """
    found, budget_bytes = list(blocked_partitions), stream.budget_bytes
    deadlocks = [blocked.deadlock for blocked in found if blocked.deadlock is not None and is_deadlock(blocked)]
    if not held.batches:
        unfilled = [deadlock for deadlock in deadlocks if not deadlock.handed]
        return _too_large(unfilled[0], budget_bytes, stream.name) if unfilled else _step_error(found, stream)
    together = [blocked.group.nbytes for blocked in found if blocked.group is not None and is_group_overdue(blocked)]
    if not together and not deadlocks and not any(is_overdue(blocked) for blocked in found):
        return _step_error(found, stream)
    others = f" ({readable_bytes(sum(together))} with the group's other members)" if together else ""
    if deadlocks and not together and len(deadlocks[0].handed) > 1:
        others = f" ({_shares(deadlocks[0].handed)})"
    numbers = _numbers(held, budget_bytes, stream.name) + others
    text = f"{numbers}; its writers wait for that space, so no batch can come: {remedy}"
    return CheckpointOverdue(text, held.batches, held.samples, held.nbytes, budget_bytes)


def _step_error(found: Sequence[BlockedPartition], stream: Stream) -> TooLarge | None:
    """Return the error for a step that is too large, unless acknowledgements make space in some partition."""
    if any(
        blocked.deadlock is not None and _is_enough(blocked, blocked.deadlock.releasable.freed_bytes)
        for blocked in found
    ):
        return None
    for blocked in found:
        if (deadlock := blocked.deadlock) is not None and is_step_too_large(blocked):
            now = replace(stream, budget_bytes=blocked.budget_bytes * len(stream.partitions))
            return step_too_large(
                now, deadlock.steps[blocked.me[0]], HEAD_STEPS, deadlock.releasable.sample_bytes, is_mean=True
            )
    return None


def _too_large(deadlock: Deadlock, budget_bytes: int, stream: str) -> TooLarge:
    return TooLarge(
        f"the members of {stream!r} hold parts of batches ({_shares(deadlock.held)}), none of which can be "
        f"filled, and they leave no space in a budget of {readable_bytes(budget_bytes)} for what would fill them: take "
        "smaller batches (or shuffle buffers), a smaller prefetch_bytes or fewer members, or a larger budget_bytes"
    )


def _shares(held: Mapping[Who, int]) -> str:
    groups = Counter[str]()
    for (group, _), nbytes in held.items():
        groups[group] += nbytes
    return ", ".join(f"group {group!r} {readable_bytes(nbytes)}" for group, nbytes in sorted(groups.items()))


def remedy_of(held: OutstandingAmount, budget_bytes: int, call: str) -> str:
    """Return what helps: an interval that fills half of the budget, or a larger one."""
    often = int(held.samples * WARN_SHARE * budget_bytes / max(1, held.nbytes))
    return f"{call} at least every {max(1, often)} samples, or give the stream a larger budget_bytes"


def _numbers(held: OutstandingAmount, budget_bytes: int, stream: str) -> str:
    return (
        f"{held.samples} samples of {stream!r} ({readable_bytes(held.nbytes)} in {held.batches} batches) were handed "
        f"out and are not acknowledged, of a budget of {readable_bytes(budget_bytes)}"
    )
