"""The plan that makes a stream's slot and its partitions agree again after the server of one of them came back older.

`look` reads the facts, `plan_reconciliation` is pure. docs/internals/lost-slots.md has the table of cases. The audit
reports the plan, and ``removal.reconcile`` carries it out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock_common.stream.commands import Client, ask_all, parse_id, server_ms
from penstock_common.stream.entries import index_ends, index_records
from penstock_common.stream.feeds import FEED
from penstock_common.stream.groups.dead_notes import load_notes
from penstock_common.stream.groups.presence import ALIVE_MS
from penstock_common.stream.groups.roster import GroupRecord, Roster, load_roster
from penstock_common.stream.manifest import (
    ABANDONED,
    OPEN,
    PRODUCED,
    SIZED,
    Manifest,
    begun_shards,
    find_manifest,
    retained_epochs,
)
from penstock_common.stream.ranges import parse_ranges
from penstock_common.stream.reported_rates import load_reported_rates
from penstock_common.stream.streams import Stream, read_counters

SETTLE_S = 1.0
"""The time between two looks. What a live process is changing differs at the second one."""


class StepKind(Enum):
    """A kind of step of a reconciliation."""

    RAISE = "raise the number of the next epoch"
    RETIRE = "remove an epoch that has no manifest"
    RELEASE = "complete a release"
    FORGET = "forget a manifest without an epoch"
    OPEN = "open an epoch again in partitions that lost it"
    ABANDON = "abandon an epoch again"
    RESTORE = "put a group back on rosters that lost it"
    CLOSE = "close an epoch again for a group"
    FINISH = "finish a shard that is complete"
    REOPEN = "have a shard made again"
    NAME = "name samples that cannot be made again"


@dataclass(frozen=True, slots=True)
class ReconcileStep:
    """One repair, and what it is of."""

    kind: StepKind
    epoch: int = -1
    manifest: str = ""
    """The id of the epoch's manifest. The step changes only the epoch with this manifest id."""
    shard: int = -1
    end: int = 0
    """The end of what the shard's index has."""
    size: int = 0
    """The samples that the shard should have."""
    partitions: tuple[int, ...] = ()
    """The partitions that lost something."""
    group: str = ""

    def __str__(self) -> str:
        """Return a sentence on what was found."""
        where = f"partition{'s' if len(self.partitions) != 1 else ''} {', '.join(map(str, self.partitions))}"
        return _FOUND[self.kind].format(step=self, where=where, last=self.size - 1)


_SHORT = (
    "shard {step.shard} of epoch {step.epoch} counts as complete, and {where} has {step.end} of its {step.size} "
    "samples: the server lost offsets {step.end}-{last}"
)
_FOUND = {
    StepKind.RAISE: "a partition has epoch {step.epoch}, and the stream would give that number out again",
    StepKind.RETIRE: "epoch {step.epoch} is in {where} and has no manifest: its bytes count, and no group can read it",
    StepKind.RELEASE: "epoch {step.epoch} was released, and its manifest, or a part of it, came back",
    StepKind.FORGET: "epoch {step.epoch} has a manifest, no partition has the epoch, and no process writes it",
    StepKind.OPEN: "epoch {step.epoch} is lost in {where}",
    StepKind.ABANDON: "epoch {step.epoch} was abandoned, and a part of the stream does not know that any more",
    StepKind.RESTORE: "group {step.group} is lost in {where}",
    StepKind.CLOSE: "group {step.group} is done with epoch {step.epoch}, and that is lost in {where}",
    StepKind.FINISH: "shard {step.shard} of epoch {step.epoch} is complete, and its manifest does not say so",
    StepKind.REOPEN: _SHORT,
    StepKind.NAME: _SHORT,
}


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One shard whose index and manifest disagree."""

    end: int
    """The offset up to which the index has it without a gap."""
    quiet_ms: int = 0
    """The time since its newest entry, by the clock of its server, if it does not count as complete."""
    is_given_up: bool = False
    """Whether an operator gave up something beyond the end."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The facts that the stream's slot and the slots of its partitions have about each other."""

    next_epoch: int
    released: Sequence[tuple[int, int]]
    """Ranges of the epochs that the stream's slot knows as released."""
    manifests: Mapping[int, Manifest]
    rosters: Sequence[Roster]
    """The roster of each partition."""
    states: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """(epoch, partition) -> the state that the partition has of an epoch on its roster."""
    shards: Mapping[tuple[int, int], ShardFacts] = field(default_factory=dict)
    """(epoch, shard) -> facts, of planned shards whose index is shorter than a complete one, or as long and not
    complete."""
    age_ms: Mapping[int, int] = field(default_factory=dict)
    """Epoch that some roster lacks -> the time since its manifest was made."""
    begun: frozenset[int] = frozenset()
    """The unsized epochs with at least one taken shard."""
    has_workers: bool = False
    """Whether a worker reported its rate within the last seconds, if some roster lacks an epoch."""


def plan_reconciliation(facts: SlotFacts) -> list[ReconcileStep]:
    """Return the steps that make a stream's slot and its partitions agree, in the order to take them. Pure.

    What is missing on a roster proves nothing, because the server may have lost it. Only a note of a release proves
    that. So nothing that a manifest counts as complete is removed without one.
    """
    return [*_numbers(facts), *_epochs(facts), *_groups(facts), *_shards(facts)]


def _numbers(facts: SlotFacts) -> Iterator[ReconcileStep]:
    used = max((epoch for roster in facts.rosters for epoch in (*roster.epochs, *roster.retiring)), default=-1)
    if facts.next_epoch <= used:
        yield ReconcileStep(StepKind.RAISE, used)


def _is_released(facts: SlotFacts, epoch: int) -> bool:
    """Return whether the epoch is known to be released: by the stream's slot, or by a roster without it."""
    ranges = list(facts.released)
    for roster in facts.rosters:
        if epoch not in roster.epochs:
            ranges += roster.retired
            # releases by earlier versions leave only this
            ranges += [(group.first, group.read) for group in roster.groups.values()]
    return any(low <= epoch <= high for low, high in ranges)


def _epochs(facts: SlotFacts) -> Iterator[ReconcileStep]:
    known = {epoch for roster in facts.rosters for epoch in roster.epochs}
    for epoch in sorted(known | facts.manifests.keys()):
        if any(epoch in roster.retiring for roster in facts.rosters):
            continue  # the next pass of a cleaner completes the release
        manifest = facts.manifests.get(epoch)
        have = [number for number, roster in enumerate(facts.rosters) if epoch in roster.epochs]
        if manifest is None:
            ids = {roster.epochs[epoch] for roster in facts.rosters if epoch in roster.epochs}
            for manifest_id in sorted(ids):
                there = tuple(n for n in have if facts.rosters[n].epochs[epoch] == manifest_id)
                yield ReconcileStep(StepKind.RETIRE, epoch, manifest_id, partitions=there)
            continue
        lost = tuple(number for number in range(len(facts.rosters)) if number not in have)
        if lost:
            kind = _lost_epoch(facts, manifest, is_everywhere=not have)
            if kind is not None:
                yield ReconcileStep(kind, epoch, manifest.id, partitions=lost)
        states = [facts.states.get((epoch, number), "") for number in have]
        other = manifest.live_state if manifest.state == ABANDONED else f"abandoned:{manifest.id}"
        if other in states:
            yield ReconcileStep(StepKind.ABANDON, epoch, manifest.id)


def _lost_epoch(facts: SlotFacts, manifest: Manifest, *, is_everywhere: bool) -> StepKind | None:
    """Return what to do about an epoch that some partitions do not have, or None for nothing."""
    if _is_released(facts, manifest.epoch):
        return StepKind.RELEASE
    if manifest.state == ABANDONED:
        return StepKind.RELEASE if is_everywhere else None
    is_unused = manifest.state != PRODUCED and not manifest.done and manifest.epoch not in facts.begun
    is_quiet = facts.age_ms.get(manifest.epoch, 0) > ALIVE_MS and not facts.has_workers
    if is_everywhere and is_unused and (manifest.state == OPEN or not manifest.samples or is_quiet):
        return StepKind.FORGET if is_quiet else None  # its opener may be about to register it
    return StepKind.OPEN


def _groups(facts: SlotFacts) -> Iterator[ReconcileStep]:
    for name in sorted({name for roster in facts.rosters for name in roster.groups}):
        lost = tuple(number for number, roster in enumerate(facts.rosters) if name not in roster.groups)
        if lost:
            yield ReconcileStep(StepKind.RESTORE, partitions=lost, group=name)
    for name, epoch in sorted({pair for roster in facts.rosters for pair in roster.closed}):
        manifest = facts.manifests.get(epoch)
        open_there = tuple(
            number
            for number, roster in enumerate(facts.rosters)
            if epoch in roster.epochs and name in roster.groups and (name, epoch) not in roster.closed
        )
        if open_there and manifest is not None and manifest.is_ended:
            yield ReconcileStep(StepKind.CLOSE, epoch, manifest.id, partitions=open_there, group=name)


def _shards(facts: SlotFacts) -> Iterator[ReconcileStep]:
    for (epoch, shard), found in sorted(facts.shards.items()):
        manifest, number = facts.manifests[epoch], shard % len(facts.rosters)
        if any(epoch in roster.retiring for roster in facts.rosters) or (
            epoch not in facts.rosters[number].epochs and _is_released(facts, epoch)
        ):
            continue  # its indexes go, or went, with the release
        size = manifest.done.get(shard, manifest.shard_size(shard))
        kind = _lost_shard(facts, manifest, shard, found, size)
        if kind is not None:
            yield ReconcileStep(kind, epoch, manifest.id, shard, end=found.end, size=size, partitions=(number,))


def _lost_shard(facts: SlotFacts, manifest: Manifest, shard: int, found: ShardFacts, size: int) -> StepKind | None:
    """Return the step for a shard whose manifest and index disagree, or None if it needs none."""
    if shard not in manifest.done:
        is_left = found.end == size and found.quiet_ms > ALIVE_MS and manifest.state == SIZED
        return StepKind.FINISH if is_left else None
    if found.end >= size or found.is_given_up or not _is_needed(facts, manifest.epoch):
        return None
    is_repeatable = manifest.kind != FEED and bool(manifest.fingerprint) and manifest.sizes is not None
    return StepKind.REOPEN if is_repeatable else StepKind.NAME


def _is_needed(facts: SlotFacts, epoch: int) -> bool:
    """Return whether a group may still read the epoch: one that has not closed it, or one that comes later."""
    groups = merged_groups(facts.rosters)
    closed = {pair for roster in facts.rosters for pair in roster.closed}
    readers = [name for name, group in groups.items() if group.holds and group.first <= epoch]
    return not readers or any((name, epoch) not in closed for name in readers)


def merged_groups(rosters: Sequence[Roster]) -> dict[str, GroupRecord]:
    """Return every group that a roster has, as the roster of the lowest partition has it."""
    found: dict[str, GroupRecord] = {}
    for roster in rosters:
        found = {**roster.groups, **found}
    return found


# --- the facts --------------------------------------------------------------------------------------------------------


def plan_settled(client: Client, stream: Stream, settle_s: float = SETTLE_S) -> list[ReconcileStep]:
    """Return the steps that two looks agree on, so that nothing counts that a live process is about to write."""
    plan = plan_reconciliation(look(client, stream))
    if not plan:
        return []
    time.sleep(settle_s)
    again = set(plan_reconciliation(look(client, stream)))
    return [step for step in plan if step in again]


def is_left_over(client: Client, stream: Stream, epoch: int) -> bool:
    """Return whether an epoch has nothing but a manifest: it was released, or its opener died before it was opened."""
    plan = plan_reconciliation(look(client, stream))
    return any(step.epoch == epoch and step.kind in (StepKind.RELEASE, StepKind.FORGET) for step in plan)


def look(client: Client, stream: Stream) -> SlotFacts:
    """Read the facts, in an order in which a running production is consistent: manifests, indexes, rosters."""
    following, _, released = read_counters(client, stream)
    manifests = _manifests(client, stream, retained_epochs(client, stream))
    shards = {
        (manifest.epoch, shard): found
        for manifest in manifests.values()
        for shard, found in _short_shards(client, stream, manifest).items()
    }
    begun = frozenset(
        epoch for epoch, one in manifests.items() if one.sizes is None and begun_shards(client, stream, one)
    )
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    # an epoch that was opened since
    manifests |= _manifests(client, stream, {e for roster in rosters for e in roster.epochs} - manifests.keys())
    lost = {epoch for epoch in manifests if any(epoch not in roster.epochs for roster in rosters)}
    now_ms = server_ms(client, stream.keys.meta) if lost else 0
    return SlotFacts(
        next_epoch=following,
        released=parse_ranges(released),
        manifests=manifests,
        rosters=rosters,
        states=_states(client, stream, rosters),
        shards=shards,
        age_ms={epoch: now_ms - manifests[epoch].created_ms for epoch in lost},
        begun=begun,
        has_workers=bool(lost) and bool(load_reported_rates(client, stream).workers),
    )


def _manifests(client: Client, stream: Stream, epochs: Iterable[int]) -> dict[int, Manifest]:
    found = ((epoch, find_manifest(client, stream, epoch)) for epoch in sorted(epochs))
    return {epoch: manifest for epoch, manifest in found if manifest is not None}


def _states(client: Client, stream: Stream, rosters: Sequence[Roster]) -> dict[tuple[int, int], str]:
    asked = [(epoch, number) for number, roster in enumerate(rosters) for epoch in roster.epochs]
    commands = [("GET", stream.partitions[number].state(epoch)) for epoch, number in asked]
    replies: list[bytes | None] = ask_all(client, commands)
    return {one: (state or b"").decode("utf-8", "replace") for one, state in zip(asked, replies, strict=True)}


def _short_shards(client: Client, stream: Stream, manifest: Manifest) -> dict[int, ShardFacts]:
    """Return the planned shards of an epoch whose index and manifest may disagree."""
    found: dict[int, ShardFacts] = {}
    if manifest.state == ABANDONED:
        return found
    shards = manifest.done if manifest.sizes is None else range(len(manifest.sizes))
    for shard, end in index_ends(client, stream, manifest.epoch, shards).items():
        is_done, size = shard in manifest.done, manifest.done.get(shard, manifest.shard_size(shard))
        if (is_done and end < size) or (not is_done and end == size):
            found[shard] = _shard_facts(client, stream, manifest, shard)
    return found


def _shard_facts(client: Client, stream: Stream, manifest: Manifest, shard: int) -> ShardFacts:
    partition, end, newest = stream.partition_of(shard), 0, 0
    for record in index_records(client, partition, manifest.epoch, shard):
        if record.first != end:
            break
        end = record.end
        newest = max(newest, parse_id(record.entry_id)[0] if record.entry_id else 0)
    groups = load_roster(client, partition).groups
    given_up = any(
        note.given_up and note.shard == shard and note.end > end
        for group in groups
        for note in load_notes(client, partition, manifest.epoch, group).values()
    )
    quiet_ms = 0 if shard in manifest.done else server_ms(client, partition.roster) - newest
    return ShardFacts(end, quiet_ms, given_up)
