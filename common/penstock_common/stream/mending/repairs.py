"""Repairs: one transaction puts a lost range back, with a record that overrides what the index says of it.

A lost end of an index is continued, because its ids may only rise. Every other record goes to the shard's repairs key.
The audit finds lost ranges, and the producer's `repair` makes their samples again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redis.exceptions import WatchError

from penstock_common.errors import BadEntry, EpochAbandoned
from penstock_common.printable import shortened
from penstock_common.server.scripts import load_script
from penstock_common.stream.audit import survey_epoch
from penstock_common.stream.audit.accounts import MissingRange
from penstock_common.stream.commands import Client, run_script, server_ms
from penstock_common.stream.entries import IndexRecord, index_record, last_given, overridden, repair_record
from penstock_common.stream.groups.presence import liveness_of
from penstock_common.stream.groups.roster import ORDERED, load_roster, reopen_for_group
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.payloads import reader_of, whole_fields
from penstock_common.stream.streams import Stream
from penstock_common.wire.codec import Fields, decode, stored_bytes

_COMMIT_REPAIR = load_script("commit_repair")
_CORRECT_BYTES = load_script("correct_bytes")


@dataclass(frozen=True, slots=True)
class RepairBlock:
    """A block for a lost range, or for a part of it."""

    first: int
    count: int
    nbytes: int
    holes: tuple[int, ...]
    fields: Fields
    """The fields of the entry to append, or empty if one was found or all are holes."""
    bad: Mapping[int, str]
    """Offset -> why, of the holes that are new."""
    found: bytes = b""
    """The id of an entry that exists and that no record names."""

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.first + self.count + len(self.holes)


def commit_patch(
    client: Client, stream: Stream, manifest: Manifest, lost: MissingRange, patch: RepairBlock, groups: Iterable[str]
) -> bool:
    """Append entry and record in one transaction. False if the range is no longer missing.

    So two repairs at once, or one that is started again, put everything back once. ``groups`` forget what they noted of
    the entry that is replaced. If it was a dead letter of a group, the group reads the epoch again. Raises
    EpochAbandoned.
    """
    groups = list(groups)
    _reopen(client, stream, manifest.epoch, lost, groups)
    while True:
        try:
            return _commit_once(client, stream, manifest, lost, patch, groups)
        except WatchError:  # another client wrote, or the connection broke: the records show whether it is done
            continue


def _reopen(client: Client, stream: Stream, epoch: int, lost: MissingRange, groups: Iterable[str]) -> None:
    """Open the epoch again: a group closes it over its dead letters, and an ordered one used other samples."""
    partition, known = stream.partition_of(lost.shard), load_roster(client, stream.partitions[0]).groups
    for group in groups:
        is_shared = group in known and known[group].kind != ORDERED
        if lost.entry and is_shared and client.hexists(partition.dead(epoch, group), lost.entry):
            reopen_for_group(client, stream, group, epoch)


def _commit_once(
    client: Client, stream: Stream, manifest: Manifest, lost: MissingRange, patch: RepairBlock, groups: Iterable[str]
) -> bool:
    """Try once. Raises WatchError if it has to be tried again."""
    partition, epoch = stream.partition_of(lost.shard), manifest.epoch
    entries, index = partition.entries(epoch), partition.index(epoch, lost.shard)
    repairs, state = partition.repairs(epoch, lost.shard), partition.state(epoch)
    with client.pipeline() as pipe:
        pipe.watch(index, repairs, state)
        if pipe.get(state) != manifest.live_state.encode():
            raise EpochAbandoned(f"epoch {epoch} of {stream.name!r} was abandoned or released: nothing to repair")
        base = [index_record(record_id, fields, index) for record_id, fields in pipe.xrange(index)]
        standing = overridden(base, [repair_record(fields, repairs) for _, fields in pipe.xrange(repairs)])
        if not _is_missing(standing, lost, patch):
            return False
        newest = _newest_id(pipe, index) if pipe.exists(index) else 0
        at_end = patch.first >= max((record.end for record in base), default=0) and patch.end > newest
        pipe.multi()
        if patch.fields:
            flat = [part for field in patch.fields for part in field]
            pipe.execute_command("XADD", entries, "NOMKSTREAM", "*", *flat)
        holes = json.dumps(patch.holes, separators=(",", ":"))
        pipe.eval(
            _COMMIT_REPAIR, 3, entries, index if at_end else repairs, partition.roster, epoch,
            f"{patch.end}-0" if at_end else "*", patch.first, patch.count, patch.nbytes, holes, patch.found,
        )  # fmt: skip
        if patch.bad:
            named = {f"{lost.shard}:{o}": json.dumps({"why": shortened(why, 500)}) for o, why in patch.bad.items()}
            pipe.hset(partition.quarantine(epoch), mapping=named)
        if lost.entry:
            pipe.xdel(entries, lost.entry)  # it still exists if only its segment is gone
            for group in groups:
                pipe.xack(entries, group, lost.entry)
                pipe.hdel(partition.dead(epoch, group), lost.entry)
        pipe.execute()
        return True


def _newest_id(client: Client, index: str) -> int:
    """Return the offset of the last record there ever was: a deleted one still limits the ids of others."""
    newest: bytes = client.xinfo_stream(index)["last-generated-id"]
    return int(newest.partition(b"-")[0])


def _is_missing(standing: list[IndexRecord], lost: MissingRange, patch: RepairBlock) -> bool:
    """Return whether the records of the patch's offsets are those of the time when the range was found missing."""
    there = [record for record in standing if record.first < patch.end and patch.first < record.end]
    if not lost.entry:
        return not there
    return [(r.entry_id, r.first, r.end) for r in there] == [(lost.entry.encode(), lost.first, lost.end)]


def holder_of(client: Client, partition: PartitionKeys, epoch: int, entry_id: str) -> tuple[str, str] | None:
    """Return (group, member) of a member that was given an entry whose payload is gone and may train on it, or None."""
    roster, now = load_roster(client, partition), server_ms(client, partition.roster)
    members = liveness_of([roster], now)
    for group in last_given(client, partition, epoch):
        for entry in client.xpending_range(partition.entries(epoch), group, entry_id, entry_id, 1):
            who = group, entry["consumer"].decode()
            if who in members and members[who].may_be_at_work:
                return who
    return None


def balance_bytes(client: Client, stream: Stream, manifest: Manifest) -> None:
    """Correct the epoch's byte count in each partition, after an operator's deletions and their repair.

    It does nothing while other clients write or remove, because the counters then change between the two reads.
    """
    epoch = manifest.epoch
    for partition, survey in zip(stream.partitions, survey_epoch(client, stream, manifest), strict=True):
        before, after = (roster.epoch_bytes.get(epoch, 0) for roster in (survey.before, survey.roster))
        named = {record.entry_id: record.nbytes for records in survey.index.values() for record in records}
        held = sum(named[entry_id] for entry_id in survey.held if entry_id in named)
        if before == after and held < after:
            run_script(client, _CORRECT_BYTES, [partition.roster], [epoch, after, held])


def find_patch(client: Client, stream: Stream, epoch: int, lost: MissingRange) -> RepairBlock | None:
    """Return the record of an entry that exists, after a check of its bytes. None if it is not what it claims to be."""
    spec = stream.require_spec()
    partition = stream.partition_of(lost.shard)
    found = client.xrange(partition.entries(epoch), lost.found, lost.found)
    try:
        segments = reader_of(stream)
        fields = whole_fields([field for _, fields in found for field in fields.items()], spec, segments)
        header, _ = decode(fields, spec, takes_refs=segments is not None)
    except BadEntry:
        return None
    said = (header.stream, header.epoch, header.shard, header.first, header.end)
    if said != (stream.id, epoch, lost.shard, lost.first, lost.end):
        return None
    nbytes = stored_bytes(header, (len(value) for _, value in fields[1:]))
    return RepairBlock(header.first, header.count, nbytes, header.holes, [], {}, lost.found.encode())
