"""Makes room and keeps order: carries out retention's plans by ids alone. Any number may run at once.

`tidy` is for a whole stream, on a timer or an operator's word; a `Janitor` frees bytes of one partition for a writer
that waits. Every step may be repeated: XDEL says what it really removed, whoever finds a begun release ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from penstock_common.stream.entries import FIRST_PAGE, Record, index_ends, index_records, trim_entries
from penstock_common.stream.groups.ledger import group_bits
from penstock_common.stream.groups.roster import (
    Roster,
    expire_silent,
    forget_consumers,
    load_roster,
    look_silent,
    server_ms,
)
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.link.commands import Client
from penstock_common.stream.manifest import Manifest, begun_shards, ended_ms, find_manifest, retained_epochs
from penstock_common.stream.removal.outlook import look_around
from penstock_common.stream.removal.release import release_epoch, unlink_epoch
from penstock_common.stream.streams import Stream, deleted, find_stream
from penstock_common.waiting import Notify
from penstock_producer.keeping.policy import Policy, parse_policy
from penstock_producer.keeping.recycling import recycle
from penstock_producer.keeping.retention import (
    EpochFacts,
    is_free,
    is_held,
    plan_policy,
    plan_release,
    plan_trim,
    trimming_groups,
)

SLACK_SHARE = 0.1
"""How much more than needed is freed at once, so that a full budget is not planned for at every block."""
SILENT_MS = 600_000
"""An undeclared group that vanished stops holding data after this long (design.md 5.6)."""
LOOK_AGAIN_S = 4.0
"""So much later who looked silent is looked at again: four beats of a member with a lease of 30 s."""
TIDY_EVERY_S = 10.0
"""How often whoever writes looks for epochs that the policy gives up, and for trainers that vanished."""
RECYCLE_EVERY_S = 0.5
"""How often, at most, a writer that waits looks for segments that nobody needs any more."""
RECYCLE_SHARE = 1 / 8
"""Of a partition's budget: so much having been freed, it looks at once. Else a fast writer would make new files."""
CHUNK = 250
"""Ids per script call: bounds how long the server is busy with one."""
SHARDS_AT_ONCE = 64
"""So many indexes are asked for their ends at once, and so far beyond those that were begun."""
FAR_S = 1.0
"""How often those beyond are asked for: whoever writes an epoch from its end is found later, and found."""


@dataclass(frozen=True, slots=True)
class Tidied:
    """What one pass did."""

    released: list[int]
    """Epochs."""
    freed_bytes: int
    """Of payload."""
    expired: list[str]
    """Groups that vanished, and hold no data from now on."""


def tidy(
    client: Client, stream: Stream, notify: Notify, silent_ms: int | None = None, policy: Policy | None = None
) -> Tidied:
    """One pass over a stream: expires who vanished, ends releases that were begun, releases what its policy gives up.

    The policy is read anew, since it may be changed at any time; ``policy`` takes its place this once. Raises
    StreamDeleted.
    """
    found = find_stream(client, stream.name)
    if found is None or found.id != stream.id:
        raise deleted(client, stream)
    expired = _expire_vanished(client, stream, SILENT_MS if silent_ms is None else silent_ms, notify)
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    for epoch, manifest_id in {e: m for roster in rosters for e, m in roster.retiring.items()}.items():
        unlink_epoch(client, stream, epoch, manifest_id)
    policy = policy or parse_policy(found.retention)
    facts = _facts(client, stream, rosters, policy)
    gone = [
        facts[epoch]
        for epoch in plan_policy(policy, facts.values(), rosters[0], server_ms(client))
        if release_epoch(client, stream, epoch, rosters[0].generation)
    ]
    recycle(client, stream)
    return Tidied([fact.epoch for fact in gone], sum(fact.nbytes for fact in gone), expired)


def _facts(client: Client, stream: Stream, rosters: list[Roster], policy: Policy) -> dict[int, EpochFacts]:
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
    """Lets go what vanished trainers held, and what Redis remembers of them.

    Looks twice: a server's clock that jumps makes everybody look silent, until he renews a second later.
    """
    expired: set[str] = set()
    looked = [look_silent(client, partition, silent_ms) for partition in stream.partitions]
    if any(looked):
        time.sleep(LOOK_AGAIN_S)
    for partition, silent in zip(stream.partitions, looked, strict=True):
        before = load_roster(client, partition).members
        expired.update(expire_silent(client, partition, silent_ms, silent))
        after = load_roster(client, partition).members if before else before
        for group, member in before.keys() - after.keys():
            forget_consumers(client, partition, group, member)
    for group in sorted(expired):
        notify(f"group {group!r} was not seen for {silent_ms / 60_000:.0f} minutes: nothing is kept for it now")
    return sorted(expired)


def make_fit(client: Client, stream: Stream, notify: Notify) -> int:
    """Brings each partition below its part of the budget, where what is there may go; returns the bytes freed."""
    freed = 0
    for partition in stream.partitions:
        over = load_roster(client, partition).bytes - stream.partition_budget
        if over > 0:
            freed += Janitor(client, stream, partition, notify).make_room(over)
    return freed


@dataclass(slots=True)
class _Trimmed:
    """What one janitor knows of an epoch's shards: it is not asked for again."""

    floors: dict[int, int] = field(default_factory=dict)
    """Shard -> offset below which everything is known to be gone."""
    gone: dict[int, set[int]] = field(default_factory=dict)
    """Shard -> ends of entries beyond the floor that are gone: behind one that somebody holds."""
    over: set[int] = field(default_factory=set)
    """Complete shards of which nothing is left."""
    begun: int = -1
    """The highest shard that was seen to have anything."""
    far_s: float = float("-inf")
    """When the shards far beyond it were asked for."""


class Janitor:
    """Frees bytes of one partition of a stream. It remembers what is gone: make one, not one a shard."""

    def __init__(
        self,
        client: Client,
        stream: Stream,
        partition: PartitionKeys,
        notify: Notify,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notify, self._clock, self._tidied_s = notify, clock, -TIDY_EVERY_S
        self._recycled_s, self._not_recycled = -RECYCLE_EVERY_S, 0
        self._client = client
        self._stream = stream
        self._partition = partition
        self._trimmed: dict[int, _Trimmed] = {}
        """Epoch -> what is gone of it."""

    def make_room(self, need_bytes: int) -> int:
        """Tries to free that many payload bytes and a little more; returns what was freed."""
        if self._clock() - self._tidied_s >= TIDY_EVERY_S:
            self._tidied_s = self._clock()
            tidy(self._client, self._stream, self._notify)
        seen = look_around(self._client, self._stream, self._partition)
        roster, first, states = seen.roster, seen.first, seen.states
        need = need_bytes + int(self._stream.partition_budget * SLACK_SHARE)
        for epoch, manifest_id in {**roster.retiring, **first.retiring}.items():
            unlink_epoch(self._client, self._stream, epoch, manifest_id)
        facts = [EpochFacts(e, states.get(e, "abandoned"), roster.epoch_bytes.get(e, 0)) for e in roster.epochs]
        freed = 0
        for epoch in plan_release(facts, first, seen.now_ms, need):
            if release_epoch(self._client, self._stream, epoch, first.generation):
                freed += roster.epoch_bytes.get(epoch, 0)
        self._trimmed = {epoch: known for epoch, known in self._trimmed.items() if epoch in roster.epochs}
        for epoch in roster.epochs:
            if freed >= need:
                break
            if not is_held(roster, epoch, seen.now_ms):
                freed += self._trim(roster, epoch, need - freed)
        self._recycle(freed)
        return freed

    def _recycle(self, freed: int) -> None:
        """Has segments used again, now and then: listing a folder costs more than looking for room."""
        self._not_recycled += freed
        is_much = self._not_recycled >= RECYCLE_SHARE * self._stream.partition_budget
        if is_much or self._clock() - self._recycled_s >= RECYCLE_EVERY_S:
            self._recycled_s, self._not_recycled = self._clock(), 0
            recycle(self._client, self._stream)

    def _trim(self, roster: Roster, epoch: int, need: int) -> int:
        """Removes entries of one epoch that every group has settled."""
        groups = trimming_groups(roster, epoch)
        manifest = find_manifest(self._client, self._stream, epoch)
        if not groups or manifest is None:
            return 0
        known = self._trimmed.setdefault(epoch, _Trimmed())
        todo, freed = self._worth_asking(manifest, known), 0
        for start in range(0, len(todo), SHARDS_AT_ONCE):
            ends = index_ends(self._client, self._partition, epoch, todo[start : start + SHARDS_AT_ONCE])
            known.begun = max([known.begun, *(shard for shard, end in ends.items() if end)])
            for shard, end in ends.items():
                if freed < need and known.floors.get(shard, 0) < end:
                    freed += self._trim_shard(roster, groups, manifest, shard, end, need - freed)
            if freed >= need:
                break
        return freed

    def _worth_asking(self, manifest: Manifest, known: _Trimmed) -> list[int]:
        """Shards of this partition that may have something to remove, rising: an epoch may have thousands."""
        begun, every = begun_shards(self._client, self._stream, manifest), len(self._stream.partitions)
        mine = [shard for shard in begun[self._partition.number :: every] if shard not in known.over]
        if self._clock() - known.far_s >= FAR_S:
            known.far_s = self._clock()
            return mine
        return [shard for shard in mine if shard <= known.begun + SHARDS_AT_ONCE * every]

    def _trim_shard(
        self, roster: Roster, groups: list[str], manifest: Manifest, shard: int, end: int, need: int
    ) -> int:
        """Removes settled entries of one shard, in pages as far as anything is settled."""
        epoch, known = manifest.epoch, self._trimmed[manifest.epoch]
        floor = known.floors.get(shard, 0)
        bits = [
            group_bits(
                self._client, self._stream, manifest, group, roster.groups[group], shard, floor, end, may_go=True
            )
            for group in groups
        ]
        settled = np.flatnonzero(np.logical_and.reduce(bits))
        if not len(settled):
            return 0
        # an entry that ends later is not settled, or ends in holes and waits for the next look
        upto = floor + int(settled[-1]) + 1
        freed, base, gone = 0, floor, known.gone.setdefault(shard, set())
        for page in _pages(index_records(self._client, self._partition, epoch, shard, after=floor, upto=upto)):
            left = [record for record in page if record.end not in gone]
            while freed < need and (plan := plan_trim(left, bits, need - freed, base)):
                now = trim_entries(self._client, self._partition, roster.generation, epoch, plan)
                if now is None:  # a group joined meanwhile: what was planned is not gone
                    return freed
                freed += now  # less than planned where others removed some of it
                gone.update(record.end for record in plan)
                left = [record for record in left if record.end not in gone]
            for record in page:
                if record.end in gone or not record.entry_id:
                    floor = record.end if floor >= record.first else floor
            if freed >= need:
                break
        known.floors[shard] = floor
        gone.difference_update([end for end in gone if end <= floor])
        if floor >= (manifest.shard_size(shard) if manifest.sizes is not None else manifest.done.get(shard, floor + 1)):
            known.over.add(shard)
            del known.floors[shard], known.gone[shard]
        return freed


class Janitors:
    """One a partition for all the shards of one writer: what is gone of them is not looked at again."""

    def __init__(self, client: Client, stream: Stream, notify: Notify) -> None:
        self._client, self._stream, self._notify = client, stream, notify
        self._of: dict[int, Janitor] = {}

    def of(self, shard: int) -> Janitor:
        """The janitor of a shard's partition."""
        partition = self._stream.partition_of(shard)
        if partition.number not in self._of:
            self._of[partition.number] = Janitor(self._client, self._stream, partition, self._notify)
        return self._of[partition.number]


def _pages(records: Iterator[Record]) -> Iterator[list[Record]]:
    """As they are read: a few at first, which are mostly enough, then more and more."""
    size = FIRST_PAGE
    while page := list(islice(records, size)):
        yield page
        size = min(2 * size, CHUNK)
