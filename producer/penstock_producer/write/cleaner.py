"""The timer of retention: a thread that cleans up a writer's stream even while no writer waits for quota.

The cleaner knows what a pass does. Nothing here refers to the writer, so an unused writer can be garbage-collected.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock_common.errors import PenstockError, ServerUnavailable, StreamDeleted
from penstock_common.explain.snapshot import PartitionSnapshot, snapshot_partition
from penstock_common.segments.folder import INLINE, SegmentFolder
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import (
    Roster,
    expire_silent,
    fetch_rosters,
    find_silent,
    forget_consumers,
    load_roster,
    merge_rosters,
    parse_roster,
)
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import ended_ms, find_manifest, retained_epochs
from penstock_common.stream.payloads import free_segments, registered_segments, seal_segments, segments_of
from penstock_common.stream.removal.deletion import release_epoch, unlink_epoch
from penstock_common.stream.removal.reconcile import ReconcileWindow, reconcile
from penstock_common.stream.servers.budgets import BudgetWatch
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.servers.suitability import allocator_settings, keeps_freed_pages
from penstock_common.stream.streams import Stream, deleted, find_stream
from penstock_common.waiting import Notify, join, to_stderr
from penstock_producer.write.retention import (
    EpochFacts,
    RetentionPolicy,
    is_free,
    is_held,
    parse_policy,
    plan_policy,
    plan_release,
)
from penstock_producer.write.trimmer import Trimmer


class CleanupTimer:
    """A thread that cleans up a stream at intervals, from `start` to `stop`. It ends when the stream is deleted."""

    def __init__(self, client: Client, stream: Stream, notify: Notify, every_s: float | None = None) -> None:
        self._client, self._stream, self._notify = client, stream, notify
        self._confirmer = Confirmer(client, stream, notify)
        self._budgets = BudgetWatch(client, stream.name, notify)
        self._window, self._has_reconciled = ReconcileWindow(client), False
        self._every_s = CLEAN_UP_EVERY_S if every_s is None else every_s
        self.stopping = threading.Event()
        """The event that ends the thread. Setting it does not wait for the end."""
        self._thread = threading.Thread(target=self._run, name=f"penstock-cleaner-{stream.name}", daemon=True)

    def start(self) -> None:
        """Start the thread. Its first pass comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Return when it no longer uses the connection."""
        self.stopping.set()
        join(self._thread, 5)

    def _run(self) -> None:
        while not self.stopping.wait(self._every_s):
            try:
                clean_up(self._client, self._stream, self._notify, confirmer=self._confirmer)
                self._reconcile()
                self._budgets.check()
            except ServerUnavailable:
                continue  # the writer reports it; the next pass asks the server again
            except StreamDeleted:
                return  # the writer meets the same error
            except PenstockError as error:
                self._notify(f"retention of {self._stream.name!r} stopped: {error}")
                return

    def _reconcile(self) -> None:
        """Reconcile the stream's slot and its partitions once, and for a while after another server came."""
        if self._window.is_open() or not self._has_reconciled:
            self._has_reconciled = not reconcile(self._client, self._stream, self._notify)


GRACE_S = 60.0
"""The writer of an unused file that was not written to for this long is dead. A live writer may have closed it a moment
before, and is about to commit the last of it."""
FOLDER_SHARE = 3 / 2
"""The share of the budget that all files may take. Beyond it, files that wait to be used again are removed. An epoch
that is released as a whole leaves as many files as the next one needs."""


def recycle(
    client: Client, stream: Stream, *, grace_s: float = GRACE_S, clock: Callable[[], float] = time.time,
    confirmer: Confirmer | None = None,
) -> int:  # fmt: skip
    """Pass over a stream's folder once. Return the number of files made ready to be used again.

    It does nothing if there is no folder, or if the folder is not visible here.

    A server that comes back older refers again to files whose entries it had removed. So nothing is used again before
    the removal is as safe as the stream's durability demands, as the ``confirmer`` (default: a new one) says.

    Raises SegmentsUnseen if its files cannot be used again.
    """
    folder = segments_of(stream)
    if folder is None:
        return 0
    files = folder.names()  # before the registry is read, so it holds no file that is registered after that
    if not files and not folder.unfinished():
        return 0
    quiet: dict[tuple[int, int], set[str]] = {}
    for name, stat in files.items():
        if clock() - stat.st_mtime >= grace_s and folder.is_unused(name):
            quiet.setdefault(_of(name), set()).add(name)
    confirmer = confirmer or Confirmer(client, stream, to_stderr)
    removal, live = confirmer.question(stream.partitions), dict[tuple[int, int], set[str]]()
    for partition in stream.partitions:
        for epoch in load_roster(client, partition).epochs:
            key = (epoch, partition.number)
            live[key] = _unused_of(client, stream, partition, epoch, quiet.get(key, set()))
    # nothing of a released epoch can be committed any more, however late it comes
    free = {name for name in files if _of(name) not in live}
    if (free or any(live.values())) and not removal.is_answered():
        return 0
    for (epoch, number), names in live.items():
        free |= set(free_segments(client, stream.partitions[number], epoch, names))
    return _give_back(folder, free, int(stream.budget_bytes * FOLDER_SHARE), grace_s, clock)


def _of(name: str) -> tuple[int, int]:
    """Return (epoch, partition) from a segment's name."""
    epoch, partition, _ = name.split("-")
    return int(epoch), int(partition)


def _unused_of(client: Client, stream: Stream, partition: PartitionKeys, epoch: int, quiet: set[str]) -> set[str]:
    """Return the segments of one epoch in one partition that nothing refers to, now or later."""
    known = registered_segments(client, partition, epoch)
    left = {name for name in quiet if name not in known or not known[name].is_sealed}
    manifest = find_manifest(client, stream, epoch) if left else None
    if manifest is not None:
        seal_segments(client, partition, manifest, left, for_the_dead=True)
    empty = {name for name, found in known.items() if not found.entries and (found.is_sealed or name in left)}
    return empty | (left - known.keys())


def _give_back(
    folder: SegmentFolder, free: set[str], most_bytes: int, grace_s: float, clock: Callable[[], float]
) -> int:
    kept = sum(folder.give_back(name, keep=True) for name in sorted(free))
    spare = sorted(folder.spare().items(), key=lambda item: item[1].st_size)
    total = sum(stat.st_size for stat in (*folder.names().values(), *dict(spare).values()))
    for name, stat in spare:  # truncated files first, then files that are too small for most segments
        if (total > most_bytes or not stat.st_size) and folder.give_back(name, keep=False):
            total -= stat.st_size
    for name, stat in folder.unfinished().items():
        if clock() - stat.st_mtime >= grace_s:
            folder.give_back(name, keep=False)
    return kept


SLACK_SHARE = 0.1
"""The share of the budget that is freed beyond what is needed, so that not every block needs a new plan."""
WHOLE_BYTES = 32 << 20
"""Payload bytes of the largest acknowledged epoch that is released at once where quota is needed. A larger one is
trimmed first, so that new blocks fit into what it leaves; see `retention.plan_trim`."""
GROUP_SILENT_MS = 600_000
"""An undeclared group that vanished stops holding data after this long."""
LOOK_AGAIN_S = 4.0
"""The pause before a silent member is checked again: four heartbeats of a member with a lease of 30 s."""
CLEAN_UP_EVERY_S = 10.0
"""The time between two checks of a writer for epochs that the policy no longer keeps, and for trainers that
vanished.
"""
RECYCLE_EVERY_S = 0.5
"""The shortest time between two looks of a waiting writer for segments that no reader needs."""
RECYCLE_SHARE = 1 / 8
"""The share of the budget after whose release a writer looks at once. Otherwise a fast writer would make new files."""


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """The result of one pass over a stream."""

    released: list[int]
    """The epochs that were released."""
    freed_bytes: int
    """The payload bytes that were freed."""
    expired: list[str]
    """The groups that vanished. They hold no data from now on."""


def clean_up(
    client: Client, stream: Stream, notify: Notify, silent_ms: int | None = None, policy: RetentionPolicy | None = None,
    confirmer: Confirmer | None = None,
) -> CleanupResult:  # fmt: skip
    """Pass over a stream once: expire vanished groups, end begun releases, and release what the policy no longer keeps.

    Args:
        client: Control connection.
        stream: Stream to clean up.
        notify: Called with the groups that data is no longer kept for.
        silent_ms: Silence after which an undeclared group is expired; None takes `GROUP_SILENT_MS`.
        policy: Policy for this pass; None reads the stream's, which may change at any time.
        confirmer: Says what is on replicas. None makes a new one.

    Raises:
        StreamDeleted: The stream is gone.
    """
    found = find_stream(client, stream.name)
    if found is None or found.id != stream.id:
        raise deleted(client, stream)
    confirmer = confirmer or Confirmer(client, found, notify)
    expired = _expire_vanished(client, stream, GROUP_SILENT_MS if silent_ms is None else silent_ms, notify)
    now_ms, replies = fetch_rosters(client, stream)
    rosters = [parse_roster(client, *one) for one in zip(stream.partitions, replies, strict=True)]
    for epoch, manifest_id in {e: m for roster in rosters for e, m in roster.retiring.items()}.items():
        unlink_epoch(client, stream, epoch, manifest_id, confirmer=confirmer)
    policy = policy or parse_policy(found.retention)
    facts, every = _facts(client, stream, rosters, policy), merge_rosters(rosters)
    gone = [
        facts[epoch]
        for epoch in plan_policy(policy, facts.values(), every, now_ms)
        if release_epoch(client, stream, epoch, rosters[0].generation, confirmer)
    ]
    recycle(client, stream, confirmer=confirmer)
    return CleanupResult([fact.epoch for fact in gone], sum(fact.nbytes for fact in gone), expired)


def _facts(client: Client, stream: Stream, rosters: list[Roster], policy: RetentionPolicy) -> dict[int, EpochFacts]:
    states = retained_epochs(client, stream)
    facts = {
        epoch: EpochFacts(epoch, states[epoch], sum(roster.epoch_bytes.get(epoch, 0) for roster in rosters))
        for epoch in rosters[0].epochs
        if epoch in states
    }
    if policy.age_ms is None:
        return facts
    ended = ended_ms(client, stream, [epoch for epoch, fact in facts.items() if is_free(fact, rosters[0])])
    return {epoch: replace(fact, ended_ms=ended.get(epoch, 0)) for epoch, fact in facts.items()}


def _expire_vanished(client: Client, stream: Stream, silent_ms: int, notify: Notify) -> list[str]:
    """Drop what vanished trainers held, and what Redis remembers of them.

    It looks twice. After a jump of the server's clock every member looks silent until it renews a second later.
    """
    expired: set[str] = set()
    now_ms, replies = fetch_rosters(client, stream)
    pairs = list(zip(stream.partitions, replies, strict=True))
    looked = [find_silent(partition, reply, now_ms - silent_ms) for partition, reply in pairs]
    if any(looked):
        time.sleep(LOOK_AGAIN_S)
    for (partition, reply), silent in zip(pairs, looked, strict=True):
        if not silent and not any(name.startswith(b"w:") for name in reply):
            continue  # the usual case: no member vanished, and there is no writer's note that may be stale
        before = load_roster(client, partition).members
        expired.update(expire_silent(client, partition, silent_ms, silent))
        after = load_roster(client, partition).members if before else before
        for group, member in before.keys() - after.keys():
            forget_consumers(client, partition, group, member)
    for group in sorted(expired):
        notify(f"group {group!r} was not seen for {silent_ms / 60_000:.0f} minutes: nothing is kept for it now")
    return sorted(expired)


def shrink_to_budget(client: Client, stream: Stream, notify: Notify) -> int:
    """Bring each partition below its part of the budget where that is allowed; return the bytes freed."""
    freed, cleaner = 0, Cleaner(client, stream, notify)
    for partition in stream.partitions:
        over = load_roster(client, partition).bytes - stream.partition_budget
        if over > 0:
            freed += cleaner.free_bytes(partition, over)
    return freed


class Cleaner:
    """Frees bytes of a stream's partitions.

    It remembers what is gone from shard to shard, so a writer makes one. The writer's shards may use it at once.
    """

    def __init__(
        self, client: Client, stream: Stream, notify: Notify, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._stream, self._notify, self._clock = client, stream, notify, clock
        self._cleaned_s, self._recycled_s = -CLEAN_UP_EVERY_S, -RECYCLE_EVERY_S
        self._not_recycled = 0
        """The bytes freed since segments were last recycled."""
        self._confirmer = Confirmer(client, stream, notify)
        self._trimmers = {one.number: Trimmer(client, stream, one, clock, self._confirmer) for one in stream.partitions}
        self._keeps_pages: dict[str, bool] = {}
        """Server -> whether it keeps freed memory, by the settings of its allocator."""

    def free_bytes(self, partition: PartitionKeys, need_bytes: int) -> int:
        """Try to free ``need_bytes`` of a partition's payload and a little more. Return the bytes freed."""
        self._clean_up()
        seen = snapshot_partition(self._client, self._stream, partition)
        roster, first, trimmer = seen.roster, seen.first, self._trimmers[partition.number]
        need = need_bytes + int(self._stream.partition_budget * SLACK_SHARE)
        for epoch, manifest_id in {**roster.retiring, **first.retiring}.items():
            unlink_epoch(self._client, self._stream, epoch, manifest_id, confirmer=self._confirmer)
        # a server may give memory back that was freed in one piece, and needs new pages then (decision 32)
        in_parts = self._stream.payload == INLINE and not self._keeps_freed_pages(partition)
        freed = self._release(seen, need, WHOLE_BYTES if in_parts else math.inf)
        trimmer.keep(roster.epochs)
        is_forgetful = any(group.holds and name not in roster.groups for name, group in first.groups.items())
        if is_forgetful:  # its server lost a group, which must not lose its entries, too
            reconcile(self._client, self._stream, self._notify)
        else:
            trimmed = _trim(trimmer, seen, need - freed, leaves_neighbours=in_parts)
            freed += trimmed
            is_more = trimmed or plan_release(_partition_facts(seen), first, seen.now_ms, need_bytes)
            if in_parts and is_more and freed < need_bytes:
                seen = snapshot_partition(self._client, self._stream, partition)
                freed += self._release(seen, need - freed)
                freed += _trim(trimmer, seen, need_bytes - freed, leaves_neighbours=False)
        self._recycle(freed)
        return freed

    def _clean_up(self) -> None:
        """Pass over the stream if that is due."""
        if self._clock() - self._cleaned_s >= CLEAN_UP_EVERY_S:
            self._cleaned_s = self._clock()
            clean_up(self._client, self._stream, self._notify, confirmer=self._confirmer)

    def _keeps_freed_pages(self, partition: PartitionKeys) -> bool:
        """Return whether the server of a partition keeps freed memory. Each server is asked once."""
        server = self._client.node_of(partition.roster).server
        if server not in self._keeps_pages:
            self._keeps_pages[server] = keeps_freed_pages(allocator_settings(self._client, partition.roster))
        return self._keeps_pages[server]

    def _release(self, seen: PartitionSnapshot, need: int, most_bytes: float = math.inf) -> int:
        """Release whole epochs until ``need`` bytes are free. Return the bytes freed."""
        facts = _partition_facts(seen)
        plan = plan_release(facts, seen.first, seen.now_ms, need, most_bytes)
        if plan and len(self._stream.partitions) > 1:  # one roster may have lost a group that the others know
            _, replies = fetch_rosters(self._client, self._stream)
            pairs = zip(self._stream.partitions, replies, strict=True)
            merged = merge_rosters([parse_roster(self._client, *one) for one in pairs])
            plan = plan_release(facts, merged, seen.now_ms, need, most_bytes)
        return sum(
            seen.roster.epoch_bytes.get(epoch, 0)
            for epoch in plan
            if release_epoch(self._client, self._stream, epoch, seen.first.generation, self._confirmer)
        )

    def _recycle(self, freed: int) -> None:
        """Recycle segments if that is due. Listing a folder costs more than looking for quota, so it is seldom due."""
        self._not_recycled += freed
        is_much = self._not_recycled >= RECYCLE_SHARE * self._stream.budget_bytes
        if is_much or self._clock() - self._recycled_s >= RECYCLE_EVERY_S:
            self._recycled_s, self._not_recycled = self._clock(), 0
            recycle(self._client, self._stream, confirmer=self._confirmer)


def _trim(trimmer: Trimmer, seen: PartitionSnapshot, need: int, *, leaves_neighbours: bool) -> int:
    """Remove acknowledged entries of a partition until ``need`` bytes are free. Return the bytes freed."""
    freed = 0
    for epoch in seen.roster.epochs:
        if freed >= need:
            break
        if not is_held(seen.roster, epoch, seen.now_ms):
            freed += trimmer.trim(seen.roster, epoch, need - freed, leaves_neighbours=leaves_neighbours)
    return freed


def _partition_facts(seen: PartitionSnapshot) -> list[EpochFacts]:
    roster, states = seen.roster, seen.states
    return [EpochFacts(e, states.get(e, "abandoned"), roster.epoch_bytes.get(e, 0)) for e in roster.epochs]
