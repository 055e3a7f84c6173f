"""Snapshots: what is known of a stream, or of one of its partitions, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_common.errors import DamagedKey
from penstock_common.stream.commands import Client, Refused, readable
from penstock_common.stream.entries import PAGE, EntryId, group_counts, index_ends, index_records, is_gone, parse_id
from penstock_common.stream.groups.ledger import behind
from penstock_common.stream.groups.positions import known_positions
from penstock_common.stream.groups.presence import Liveness, is_returned, liveness_of
from penstock_common.stream.groups.roster import (
    ORDERED,
    GroupRecord,
    Roster,
    WaitingWriter,
    load_roster,
    ms_of,
    parse_roster,
    server_ms,
)
from penstock_common.stream.keys import LAST, PartitionKeys
from penstock_common.stream.manifest import (
    PRODUCED,
    Manifest,
    begun_shards,
    find_manifest,
    parse_states,
    retained_epochs,
)
from penstock_common.stream.mending.bad import kinds_of_bad
from penstock_common.stream.payloads import PlaneView, plane_of
from penstock_common.stream.reported_rates import ReportedRate, ReportedRates, load_reported_rates
from penstock_common.stream.servers.suitability import ServerMemory
from penstock_common.stream.streams import Stream, list_streams, load_stream, look_at_each, read_counters

FIRST_PAGE = 8
"""The index records that are read first, because most groups are hardly behind."""


@dataclass(slots=True)
class EpochView:
    """One retained epoch."""

    epoch: int
    state: str
    kind: str
    planned: int | None
    """The planned samples, or None while it is open."""
    committed: int
    """The committed samples, with the bad ones."""
    shards_done: int
    shards: int
    bad: int
    reasons: list[dict[str, Any]]
    """The most frequent reasons of bad samples: `kinds_of_bad`."""
    entries: int
    bytes: int
    """The payload bytes that are still held."""
    trimmed: bool
    """Whether retention removed entries of it."""
    pinned: bool
    """Whether an operator keeps it."""


@dataclass(slots=True)
class GroupView:
    """One group, summed over partitions and the epochs that it has not finished."""

    name: str
    kind: str
    declared: bool
    holds: bool
    """Whether the stream keeps for it what it has not read."""
    first_epoch: int
    lag_entries: int = 0
    """Entries that were given to no member yet."""
    lag_samples: int = 0
    pending_entries: int = 0
    """Entries that were given to a member and not acknowledged."""
    dead_letters: int = 0
    settled_epochs: list[int] = field(default_factory=list)
    members: list[dict[str, Any]] = field(default_factory=list)
    """For each member ``name``, ``seen_s`` (seconds since its last heartbeat, None for one that is gone),
    ``pending_entries``, ``has_ended`` (whether its process is known to have ended), ``is_silent``."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """For each rank of an ordered group ``rank``, ``epoch``, ``position`` below which it is done, ``planned``
    positions."""


@dataclass(slots=True)
class StreamView:
    """One stream."""

    name: str
    id: str
    spec: dict[str, Any] | None
    partitions: int
    budget_bytes: int
    block_bytes: int
    retention: str
    payload: PlaneView
    bytes: int
    """The payload bytes held."""
    entries: int
    next_epoch: int
    final: int | None
    """The planned number of epochs, or None if it is not known."""
    released: str
    """The ranges of epochs that are gone."""
    epochs: list[EpochView]
    groups: list[GroupView]
    replays: list[dict[str, Any]]
    """For each replay ``epoch`` and ``ends_in_s``."""
    waiting: list[dict[str, Any]]
    """The writers that wait for quota, the oldest wait first: ``epoch``, ``shard``, ``since_s``, ``need_bytes``,
    ``why``."""
    workers: list[dict[str, Any]]
    """The workers at work for it: ``name``, ``rate`` (samples a second of work), and the parts of their time: ``busy``,
    ``room`` (waiting for quota) and ``idle`` (no job). Only those of `penstock produce` and `worker`."""
    trainers: list[dict[str, Any]]
    """For each trainer ``group``, ``member``, ``rate``: the samples a second that it would take if it never waited."""


def inspect_streams(client: Client) -> tuple[list[StreamView], dict[str, DamagedKey]]:
    """Return every stream of the server, and for damaged ones name -> error."""
    return look_at_each(list_streams(client), lambda name: inspect_stream(client, name))


def inspect_stream(client: Client, name: str) -> StreamView:
    """Return one stream. Raises StreamNotFound."""
    stream = load_stream(client, name)
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    now = server_ms(client)
    going = {epoch for roster in rosters for epoch in roster.retiring}  # the next pass of retention ends it
    there = [epoch for epoch in retained_epochs(client, stream) if epoch not in going]
    manifests = [m for e in there if (m := find_manifest(client, stream, e)) is not None]
    epochs = [_epoch_view(client, stream, manifest, rosters) for manifest in manifests]
    names = sorted({name for roster in rosters for name in roster.groups})
    following, final, released = read_counters(client, stream)
    rates = load_reported_rates(client, stream)
    return StreamView(
        name=name,
        id=stream.id,
        spec=None if stream.spec is None else stream.spec.as_json(),
        partitions=len(stream.partitions),
        budget_bytes=stream.budget_bytes,
        block_bytes=stream.block_bytes,
        retention=stream.retention,
        payload=plane_of(stream),
        bytes=sum(roster.bytes for roster in rosters),
        entries=sum(epoch.entries for epoch in epochs),
        next_epoch=following,
        final=final,
        released=released,
        epochs=epochs,
        groups=[_group_view(client, stream, name, manifests, rosters, now) for name in names],
        replays=[
            {"epoch": epoch, "ends_in_s": round((till - now) / 1000, 1)}
            for epoch, till in rosters[0].replays.values()
            if till > now
        ],
        waiting=_waiting(rosters, now),
        workers=[{"name": name, "rate": told.rate, **_times(told)} for name, told in rates.workers.items()],
        trainers=[{"group": g, "member": m, "rate": told.rate} for (g, m), told in rates.trainers.items()],
    )


def _times(told: ReportedRate) -> dict[str, float]:
    return {kind: told.shares.get(kind, 0.0) for kind in ("busy", "room", "idle")}


@readable(lambda client, stream, epoch: stream.partitions[0].roster)
def held_bytes(client: Client, stream: Stream, epoch: int) -> int:
    """Return the payload bytes that the server holds of an epoch."""
    return sum(int(client.hget(partition.roster, f"b:{epoch}") or 0) for partition in stream.partitions)


def _waiting(rosters: list[Roster], now: int) -> list[dict[str, Any]]:
    waiting = [(place, waiter) for roster in rosters for place, waiter in roster.waiting.items()]
    return [
        {
            "epoch": epoch,
            "shard": shard,
            "since_s": round((now - waiter.since_ms) / 1000, 1),
            "need_bytes": waiter.need_bytes,
            "why": waiter.why,
        }
        for (epoch, shard), waiter in sorted(waiting, key=lambda each: each[1].since_ms)
    ]


def _epoch_view(client: Client, stream: Stream, manifest: Manifest, rosters: list[Roster]) -> EpochView:
    epoch, shards = manifest.epoch, begun_shards(client, stream, manifest)
    with client.pipeline(transaction=False) as pipe:
        for partition in stream.partitions:
            pipe.xlen(partition.entries(epoch))
            pipe.hlen(partition.quarantine(epoch))
        lengths: list[int] = pipe.execute()
    return EpochView(
        epoch=epoch,
        state=manifest.state,
        kind=manifest.kind,
        planned=manifest.samples,
        committed=_committed(client, stream, manifest, shards),
        shards_done=len(manifest.done),
        shards=len(shards),
        bad=sum(lengths[1::2]),
        reasons=kinds_of_bad(client, stream, epoch) if any(lengths[1::2]) else [],
        entries=sum(lengths[::2]),
        bytes=sum(roster.epoch_bytes.get(epoch, 0) for roster in rosters),
        trimmed=any(epoch in roster.trimmed for roster in rosters),
        pinned=any(epoch in roster.pinned for roster in rosters),
    )


def _committed(client: Client, stream: Stream, manifest: Manifest, shards: range) -> int:
    """Return the committed samples, with the bad ones.

    A complete epoch is not read: hundreds of them may be kept, with thousands of shards.
    """
    if manifest.state == PRODUCED and manifest.samples is not None:
        return manifest.samples
    every = len(stream.partitions)
    mine = {partition: shards[partition.number :: every] for partition in stream.partitions}
    return sum(sum(index_ends(client, p, manifest.epoch, some).values()) for p, some in mine.items())


def _group_view(
    client: Client, stream: Stream, name: str, manifests: list[Manifest], rosters: list[Roster], now_ms: int
) -> GroupView:
    record = next(roster.groups[name] for roster in rosters if name in roster.groups)
    view = GroupView(name, record.kind, record.declared, record.holds, record.first)
    view.settled_epochs = sorted({epoch for group, epoch in rosters[0].closed if group == name})
    held: dict[str, int] = {}
    for manifest in manifests:
        for partition in stream.partitions if record.first <= manifest.epoch else ():
            view.dead_letters += client.hlen(partition.dead(manifest.epoch, name))
            if manifest.epoch not in view.settled_epochs and record.kind != ORDERED:
                _add_partition(client, stream, partition, manifest, view, held)
        if record.kind == ORDERED and record.first <= manifest.epoch and manifest.epoch not in view.settled_epochs:
            _add_ranks(client, stream, manifest, record, view)
    members = {member: one for (group, member), one in liveness_of(rosters, now_ms).items() if group == name}
    for member in sorted({*members, *held}):
        one = members.get(member, Liveness())
        view.members.append(
            {
                "name": member,
                "seen_s": None if one.unseen_s is None else round(one.unseen_s, 1),
                "pending_entries": held.get(member, 0),
                "has_ended": one.has_ended,
                "is_silent": one.is_silent and not is_returned(member),
            }
        )
    return view


def _add_partition(
    client: Client, stream: Stream, partition: PartitionKeys, manifest: Manifest, view: GroupView, held: dict[str, int]
) -> None:
    """Add one partition of one epoch to a group's sums."""
    epoch, key = manifest.epoch, partition.entries(manifest.epoch)
    counts = group_counts(client, partition, epoch)
    last = counts.get(view.name, {}).get("last-delivered-id")
    if last is None:
        return
    summary = _pending_summary(client, key, view.name)
    view.pending_entries += int(summary["pending"])
    for consumer in summary["consumers"]:
        member = consumer["name"].decode()
        held[member] = held.get(member, 0) + int(consumer["pending"])
    newest = counts.get(LAST, {}).get("last-delivered-id")
    if newest is not None and parse_id(last) >= parse_id(newest):  # it was given everything there is: no index has more
        return
    for shard in begun_shards(client, stream, manifest):
        if stream.partition_of(shard) == partition:
            entries, samples = _behind(client, partition, epoch, shard, parse_id(last))
            view.lag_entries += entries
            view.lag_samples += samples


def _add_ranks(client: Client, stream: Stream, manifest: Manifest, record: GroupRecord, view: GroupView) -> None:
    """Add one epoch of an ordered group: what is committed above its lowest rank, and the position of each rank."""
    positions = known_positions(client, stream, manifest.epoch, view.name)
    for rank in range(record.world):
        view.ranks.append(
            {"rank": rank, "epoch": manifest.epoch, "position": positions.of(rank), "planned": manifest.samples}
        )
    for shard, lo, hi in behind(client, stream, manifest, view.name, record):
        for found in index_records(client, stream.partition_of(shard), manifest.epoch, shard, after=lo, upto=hi):
            view.lag_entries += bool(found.entry_id)
            at = max(lo, found.first)
            view.lag_samples += found.end - at - sum(hole >= at for hole in found.holes)


def _pending_summary(client: Client, key: str, group: str) -> dict[str, Any]:
    try:
        return dict(client.xpending(key, group))
    except Refused as error:
        if not is_gone(error):
            raise
        return {"pending": 0, "consumers": []}


def _behind(client: Client, partition: PartitionKeys, epoch: int, shard: int, last: EntryId) -> tuple[int, int]:
    """Return entries and samples of a shard after the last delivered id, from the index's end: 6.2 has no ``lag``.

    Ids of entries rise with offsets, so this reads as much as the group is behind.
    """
    entries = samples = 0
    end, count = "+", FIRST_PAGE
    while True:
        page: list[tuple[bytes, dict[bytes, bytes]]] = client.xrevrange(
            partition.index(epoch, shard), max=end, count=count
        )
        for _, fields in page:
            if not fields[b"e"]:  # a block of holes
                continue
            if parse_id(fields[b"e"]) <= last:
                return entries, samples
            entries += 1
            samples += int(fields[b"n"])
        if len(page) < count:
            return entries, samples
        count = PAGE
        end = f"({page[-1][0].decode()}"


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """One member of a group, or under a name that `is_returned` the entries that members returned."""

    name: str
    liveness: Liveness
    pending_entries: int
    waits_s: float | None
    """How long its loop has waited for a batch, or None while it does not wait."""

    @property
    def is_silent(self) -> bool:
        """Return True if the member is dead as far as is known."""
        return self.liveness.is_silent and not is_returned(self.name)

    @property
    def is_live(self) -> bool:
        """Return True if it is a member, and not silent."""
        return not self.liveness.is_silent and not is_returned(self.name)


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group, summed over partitions and the epochs that it has not finished."""

    name: str
    kind: str
    declared: bool
    holds: bool
    """Whether the stream keeps for it what it has not read."""
    lag_entries: int
    """Entries that were written and given to no member yet, or above the position of an ordered group's slowest rank.
    """
    lag_samples: int
    lag_bytes: int
    lag_s: float
    """The age of the oldest such entry, or 0 without one."""
    pending_entries: int
    """Entries that were given to a member and not acknowledged."""
    redelivered_entries: int
    """Entries that were given out more than once, of the 100 oldest pending ones of each key."""
    dead_letters: int
    given_samples: int
    given_bytes: int
    members: tuple[MemberSnapshot, ...]
    world: int = 0
    """The ranks of an ordered group."""


@dataclass(frozen=True, slots=True)
class EpochSnapshot:
    """One retained epoch."""

    epoch: int
    state: str
    kind: str
    planned: int | None
    """The planned samples, or None while it is open."""
    committed: int
    """The committed samples, with the bad ones."""
    bad: int
    bytes: int
    read: Mapping[str, int]
    """Group -> samples of it that the group was given or is done with, for groups that read it."""


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """One stream."""

    name: str
    id: str
    at_s: float
    """The time on this process's monotonic clock."""
    budget_bytes: int
    held_bytes: int
    next_epoch: int
    final: int | None
    """The planned number of epochs, or None if it is not known."""
    made_entries: int
    made_samples: int
    made_bytes: int
    epochs: tuple[EpochSnapshot, ...]
    groups: tuple[GroupSnapshot, ...]
    waiting: Mapping[tuple[int, int], WaitingWriter]
    """(epoch, shard) -> its writer, of those that wait for quota."""
    waited_s: float
    """How long the longest of them has waited."""
    rates: ReportedRates
    memory: ServerMemory
    payload: str = "inline"
    """Where payloads lie: ``inline``, or ``segments:`` and a folder."""
    replays: int = 0
    """The replays that hold an epoch."""


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


@dataclass(frozen=True, slots=True)
class PartitionSnapshot:
    """A partition at one moment."""

    roster: Roster
    first: Roster
    """The roster of the first partition. Groups join there first, so it has all groups and what they are done with."""
    now_ms: int
    """The server's time."""
    states: dict[int, str]
    """Epoch -> state of its manifest."""


def snapshot_partition(client: Client, stream: Stream, partition: PartitionKeys) -> PartitionSnapshot:
    """Read the facts. Raises DamagedKey."""
    begin = stream.partitions[0]
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(stream.keys.epochs)
        pipe.hgetall(partition.roster)
        if partition != begin:
            pipe.hgetall(begin.roster)
        now, states, *rosters = pipe.execute()
    own = parse_roster(client, partition, rosters[0])
    first = own if partition == begin else parse_roster(client, begin, rosters[1])
    return PartitionSnapshot(own, first, ms_of(now), parse_states(stream, states))
