"""An operator's decision that groups continue without what is dead or lost. Identity and reason are kept.

A shared group's samples become acknowledged bits. An ordered group has no bits. Its readers treat these samples
as holes. Every rank fills a hole with the same sample. The code trusts no number in an entry.
"""

from __future__ import annotations

from redis.exceptions import ResponseError

from penstock_common.errors import EntryNotFound, GroupNotFound, StreamConflict
from penstock_common.printable import shortened
from penstock_common.server.scripts import load_script
from penstock_common.stream.audit import audit_stream, find_missing_ranges
from penstock_common.stream.commands import Arg, Client, run_script, server_ms
from penstock_common.stream.entries import IndexRecord, is_gone, list_pending
from penstock_common.stream.groups.dead_notes import DeadLetterNote, load_notes, write_note
from penstock_common.stream.groups.ledger import runs, uncovered
from penstock_common.stream.groups.positions import known_positions, starts_of
from penstock_common.stream.groups.roster import ORDERED, GroupRecord, close_for_group, load_roster, require_group
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import PRODUCED, Manifest, begun_shards, load_manifest
from penstock_common.stream.mending.bad import DeadLetter, letter_of, records_by_entry
from penstock_common.stream.mending.repairs import balance_bytes
from penstock_common.stream.streams import Stream

_GIVE_UP_SAMPLES = load_script("give_up_samples")


def drop_bad(
    client: Client, stream: Stream, epoch: int, *, group: str | None, reason: str, entry: str | None = None
) -> list[DeadLetter]:
    """Let a group (None: every group) continue without what is dead or lost, or without one entry.

    The samples count as done, and are kept by identity and reason. An entry that no producer committed is deleted when
    every group drops it (an ordered group never meets one). Returns what was given up. Raises EntryNotFound,
    GroupNotFound, StreamConflict.
    """
    manifest = load_manifest(client, stream, epoch)
    groups = _groups(client, stream, epoch, group)
    done: list[DeadLetter] = []
    closed = load_roster(client, stream.partitions[0]).closed
    for name, known in groups.items():
        if known.kind == ORDERED:
            if (name, epoch) not in closed:
                done += _drop_ordered(client, stream, manifest, name, known, reason, entry)
        else:
            done += _drop_entries(client, stream, manifest, name, reason, entry, again=group is None)
            done += _drop_lost(client, stream, manifest, name, reason) if entry is None else []
        if manifest.state == PRODUCED and not uncovered(client, stream, manifest, name):
            close_for_group(client, stream, name, epoch)
    if entry is not None and not done:
        raise EntryNotFound(
            f"entry {entry} of epoch {epoch} is neither a dead letter of {', '.join(groups)} nor pending there: what a "
            "group was not given yet cannot be dropped; what is lost is dropped without naming an entry"
        )
    if group is None:
        _delete_strays(client, stream, epoch, done)
    if done and manifest.state == PRODUCED:
        balance_bytes(client, stream, manifest)  # what is gone takes no quota
    return done


def _drop_entries(
    client: Client, stream: Stream, manifest: Manifest, group: str, reason: str, entry: str | None, *, again: bool
) -> list[DeadLetter]:
    """Drop dead letters, or the one entry that is named: dead, pending or gone.

    ``again``: also what this group gave up before and no index names, which could otherwise never be deleted.
    """
    done = []
    for partition in stream.partitions:
        notes = load_notes(client, partition, manifest.epoch, group)
        dead = [name for name, note in notes.items() if not note.given_up or (again and note.shard < 0)]
        # pending before the records: if no record of an ended epoch names an entry, no producer committed it
        is_swept = entry is None and manifest.is_ended
        pending = list_pending(client, partition, manifest.epoch, group) if is_swept else []
        records = records_by_entry(client, stream, manifest, partition)
        strays = [one.entry_id for one in pending if one.entry_id not in records]
        wanted = [entry.encode()] if entry is not None else [*dead, *strays]
        if strays:  # an entry that only lost its record is delivered as it is
            whole = {lost.found.encode() for lost in find_missing_ranges(client, stream, manifest.epoch)}
            wanted = [entry_id for entry_id in wanted if entry_id not in whole]
        for entry_id in wanted:
            if entry_id in dead or _is_pending(client, partition, manifest.epoch, group, entry_id):
                shard, record = records.get(entry_id, (-1, None))
                why = f"{reason} ({notes[entry_id].why})" if entry_id in notes else reason
                done.append(_give_up(client, partition, manifest, group, entry_id, shard, record, why))
    return done


def _drop_lost(client: Client, stream: Stream, manifest: Manifest, group: str, reason: str) -> list[DeadLetter]:
    """Discard the samples that the group can never get, by the audit, and return them."""
    audits = audit_stream(client, stream, epoch=manifest.epoch).epochs
    lost = audits[0].groups[group].lost_ranges if audits and group in audits[0].groups else []
    done = []
    for shard, first, end in lost:
        partition = stream.partition_of(shard)
        record = IndexRecord(end, b"", first, end - first, 0, ())
        done.append(_give_up(client, partition, manifest, group, b"", shard, record, reason))
    return done


# --- ordered groups ---------------------------------------------------------------------------------------------------


def _drop_ordered(
    client: Client, stream: Stream, manifest: Manifest, group: str, known: GroupRecord, reason: str, entry: str | None
) -> list[DeadLetter]:
    """Discard an ordered group's dead letters and all missing samples, or one entry. Return what was discarded."""
    done = []
    for partition in stream.partitions:
        notes = load_notes(client, partition, manifest.epoch, group)
        over = {name for name, note in notes.items() if note.given_up}
        records = records_by_entry(client, stream, manifest, partition)
        wanted = [entry.encode()] if entry is not None else list(notes)
        for entry_id in wanted:
            if entry_id in records and entry_id not in over:
                shard, record = records[entry_id]
                why = f"{reason} ({notes[entry_id].why})" if entry_id in notes else reason
                done.append(_give_up(client, partition, manifest, group, entry_id, shard, record, why, has_bits=False))
    if entry is None:
        done += _drop_missing(client, stream, manifest, group, known, reason)
    return done


def _drop_missing(
    client: Client, stream: Stream, manifest: Manifest, group: str, known: GroupRecord, reason: str
) -> list[DeadLetter]:
    """Discard what a repair would put back and the group's lowest rank has not passed. Return what was discarded.

    Each part is a whole entry or a whole gap.
    """
    starts = starts_of(manifest, begun_shards(client, stream, manifest))
    minimum = known_positions(client, stream, manifest.epoch, group).minimum(known.world)
    done = []
    for lost in find_missing_ranges(client, stream, manifest.epoch):
        partition, entry_id = stream.partition_of(lost.shard), lost.entry.encode()
        name = entry_id or f"{lost.shard}:{lost.first}-{lost.end}".encode()
        note = load_notes(client, partition, manifest.epoch, group).get(name)
        if starts.get(lost.shard, 0) + lost.end > minimum and not (note is not None and note.given_up):
            record = IndexRecord(lost.end, entry_id, lost.first, lost.end - lost.first - len(lost.holes), 0, lost.holes)
            done.append(
                _give_up(client, partition, manifest, group, entry_id, lost.shard, record, reason, has_bits=False)
            )
    return done


# --- parts ------------------------------------------------------------------------------------------------------------


def _give_up(
    client: Client, partition: PartitionKeys, manifest: Manifest, group: str, entry_id: bytes, shard: int,
    record: IndexRecord | None, why: str, *, has_bits: bool = True,
) -> DeadLetter:  # fmt: skip
    """Discard one entry or range. ``record`` has the identity; without it no sample counts as done.

    ``has_bits`` is whether the group has a ledger; an ordered one has positions.
    """
    first, end = (record.first, record.end) if record else (0, 0)
    note = DeadLetterNote(
        shortened(why, 500), server_ms(client, partition.roster), True, shard if record else -1, first, end
    )
    name = entry_id or f"{shard}:{first}-{end}".encode()
    holes = record.holes if record else ()
    spans = runs([offset for offset in range(first, end) if offset not in holes]) if has_bits else []
    keys = [
        partition.state(manifest.epoch), partition.entries(manifest.epoch), partition.dead(manifest.epoch, group),
        partition.ledger(manifest.epoch, group, max(shard, 0)),
    ]  # fmt: skip
    args: list[Arg] = [manifest.live_state, group, entry_id, name, write_note(note), len(spans)]
    args += [bound for span in spans for bound in span]
    if run_script(client, _GIVE_UP_SAMPLES, keys, args) != 1:
        raise StreamConflict(f"epoch {manifest.epoch} was abandoned or released: no group waits for its samples")
    return letter_of(manifest.epoch, group, name, note)


def _delete_strays(client: Client, stream: Stream, epoch: int, done: list[DeadLetter]) -> None:
    for letter in done:
        if letter.shard is None:
            for partition in stream.partitions:
                client.xdel(partition.entries(epoch), letter.entry)
                for name in load_roster(client, partition).groups:
                    client.xack(partition.entries(epoch), name, letter.entry)
                    client.hdel(partition.dead(epoch, name), letter.entry)


def _is_pending(client: Client, partition: PartitionKeys, epoch: int, group: str, entry_id: bytes) -> bool:
    try:
        return bool(client.xpending_range(partition.entries(epoch), group, entry_id, entry_id, 1))
    except ResponseError as error:
        if is_gone(error):
            return False
        raise EntryNotFound(f"{entry_id.decode()!r} is no entry's id: they look like 1700000000000-0") from None


def _groups(client: Client, stream: Stream, epoch: int, group: str | None) -> dict[str, GroupRecord]:
    roster = load_roster(client, stream.partitions[0])
    if group is not None:
        require_group(client, stream, group)
    reading = {name: g for name, g in roster.groups.items() if g.first <= epoch and group in (None, name)}
    if not reading:
        raise GroupNotFound(f"no group of {stream.name!r} reads epoch {epoch}: there is nobody to drop anything for")
    return reading
