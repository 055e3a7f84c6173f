"""The bytes that a stream's groups were given and have not acknowledged.

Asked only when a wait has lasted: by ids and index records, never payloads. What follows from it is ``overdue``'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock_common.errors import PenstockError
from penstock_common.explain.backlog import missing_members, told_missing
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import Record, index_records, list_pending
from penstock_common.stream.groups.ledger import group_bits
from penstock_common.stream.groups.roster import SHARED, Roster, load_roster, server_ms
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest
from penstock_common.stream.servers.suitability import readable_bytes
from penstock_common.stream.streams import Stream


@dataclass(frozen=True, slots=True)
class GroupBacklog:
    """The bytes that the members of one shared group hold together in a partition."""

    nbytes: int = 0
    """Payload bytes of entries given out and not acknowledged; an entry counts whole."""
    freed_bytes: int = 0
    """Of them, what would go if this group alone settled it: no other group, pin or replay needs it."""
    members: int = 0
    """How many members have something."""


def hold_of(
    client: Client, stream: Stream, partition: PartitionKeys, roster: Roster, group: str, *, with_freed: bool
) -> GroupBacklog:
    """Counts it; ``freed_bytes`` only where asked for."""
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


def _records(
    client: Client, stream: Stream, partition: PartitionKeys, manifest: Manifest
) -> Iterator[tuple[int, list[Record]]]:
    for shard in begun_shards(client, stream, manifest):
        if stream.partition_of(shard) == partition:
            yield shard, list(index_records(client, partition, manifest.epoch, shard))


def _freed(
    client: Client, stream: Stream, manifest: Manifest, roster: Roster, group: str, shard: int,
    held: list[Record],
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


def why_no_room(client: Client, stream: Stream) -> str:
    """Return why the awaited shard's writer waits for space: what is held, and by whom.

    Return '' if it does not wait.
    """
    with suppress(PenstockError):  # a sentence is no place to fail
        for partition in stream.partitions:
            roster = load_roster(client, partition)
            # a full folder holds up every writer
            awaited = [waiter for waiter in roster.waiting.values() if waiter.is_next or waiter.why == "folder"]
            if awaited:
                return _sentence(client, stream, partition, roster, awaited[0].why)
    return ""


def _sentence(client: Client, stream: Stream, partition: PartitionKeys, roster: Roster, why: str) -> str:
    if why == "memory":
        return "its writer waits for room in the server's memory, which others fill"
    if why == "folder":
        return f"its writer waits for space in the full folder of its payloads ({stream.payload.partition(':')[2]})"
    share = f"partition {partition.number}'s share of " if len(stream.partitions) > 1 else ""
    budget = f"{share}the budget, {readable_bytes(stream.partition_budget)},"
    parts = [f"{readable_bytes(roster.bytes)} of {budget} is held"]
    for name, record in roster.groups.items():
        hold = hold_of(client, stream, partition, roster, name, with_freed=False) if record.kind == SHARED else None
        if hold is not None and hold.nbytes:
            parts.append(f"group {name!r} has {readable_bytes(hold.nbytes)} unacknowledged")
    now_ms = server_ms(client)
    if missing := missing_members(client, partition, roster, roster.groups, now_ms):
        parts.append(f"last seen a while ago: {told_missing(missing)}")
    return f"its writer waits for room ({'; '.join(parts)})"
