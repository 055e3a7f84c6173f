"""What went wrong with single samples and entries, and an operator's word on it: list, show, retry, drop.

Quarantined samples are holes: settled for every group, for ever. Dead letters are a group's own. Nothing here decodes a
payload, and no number in an entry is believed: identities come from the shard indexes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from redis.exceptions import ResponseError

from penstock_common.errors import BadEntry, EntryNotFound, GroupNotFound, StreamConflict
from penstock_common.format.header import parse_header
from penstock_common.format.limits import MAX_HEADER_BYTES
from penstock_common.stream.audit import audit_stream, survey_epoch
from penstock_common.stream.audit.accounts import MissingRange
from penstock_common.stream.commands import Arg, Client, run_script
from penstock_common.stream.dead import DeadNote, load_notes, write_note
from penstock_common.stream.entries import Record, index_records, is_gone, list_pending
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.ledger import runs, uncovered
from penstock_common.stream.lua.repairs import GIVE_UP, REOPEN, RETRY, SHOW
from penstock_common.stream.manifest import PRODUCED, Manifest, begun_shards, load_manifest, retained_epochs
from penstock_common.stream.repairs import balance_bytes
from penstock_common.stream.roster import ORDERED, SHARED, close_for_group, load_roster, require_group, server_ms
from penstock_common.stream.streams import Stream


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A sample that its source could not make."""

    epoch: int
    shard: int
    offset: int
    why: str
    """Names the source's file or item."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Something that one group goes without."""

    epoch: int
    group: str
    entry: str
    """Id of the entry; empty for samples that were given up and have no entry."""
    shard: int | None
    """None where no index names the entry: it is none of a producer's, or its record is lost."""
    first: int
    end: int
    why: str
    since_ms: int
    """Server time, 0 where it was not noted."""
    given_up: bool
    """By an operator's word."""


@dataclass(slots=True)
class Bad:
    """All of it, of some epochs."""

    quarantined: list[Quarantined] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EntryView:
    """One entry, as far as it can be shown without decoding it."""

    epoch: int
    entry: str
    shard: int | None
    """As the index has it."""
    first: int
    end: int
    header: str
    """As it stands there, ASCII, at most `SHOWN_HEADER` characters; empty where there is none."""
    problem: str
    """Why the header cannot be read; empty where it can."""
    fields: list[tuple[str, int]]
    """Name and bytes of each field."""
    dead_for: list[DeadLetter]


SHOWN_HEADER = 4000


def list_bad(client: Client, stream: Stream, *, epoch: int | None = None, group: str | None = None) -> Bad:
    """Quarantined samples and dead letters of every retained epoch, or of one; raises EpochNotFound, GroupNotFound."""
    if group is not None:
        require_group(client, stream, group)
    found = Bad()
    for number in _epochs(client, stream, epoch):
        manifest = load_manifest(client, stream, number)
        for partition in stream.partitions:
            found.quarantined += _quarantined(client, partition, number)
            found.dead += _letters(client, stream, manifest, partition, group)
    return found


def show_entry(client: Client, stream: Stream, epoch: int, entry: str) -> EntryView:
    """Header and sizes of an entry; no payload leaves the server. Raises EntryNotFound."""
    manifest = load_manifest(client, stream, epoch)
    letters = [letter for letter in list_bad(client, stream, epoch=epoch).dead if letter.entry == entry]
    for partition in stream.partitions:
        try:
            reply = run_script(client, SHOW, [partition.entries(epoch)], [entry, MAX_HEADER_BYTES])
        except ResponseError:
            raise EntryNotFound(f"{entry!r} is no entry's id: they look like 1700000000000-0") from None
        if reply:
            shard, record = _records(client, stream, manifest, partition).get(entry.encode(), (None, None))
            return EntryView(
                epoch, entry, shard, record.first if record else 0, record.end if record else 0,
                ascii(reply[0].decode("utf-8", "backslashreplace"))[1:-1][:SHOWN_HEADER], _problem(stream, reply[0]),
                [(ascii(name.decode("utf-8", "backslashreplace"))[1:-1], int(n)) for name, n in _pairs(reply[1:])],
                letters,
            )  # fmt: skip
    raise EntryNotFound(
        f"epoch {epoch} of {stream.name!r} has no entry {entry}: it was deleted, or trimmed; "
        f"`penstock bad list {stream.name}` names those there are"
    )


def retry_dead(
    client: Client, stream: Stream, *, epoch: int | None = None, group: str | None = None, entry: str | None = None
) -> list[DeadLetter]:
    """Gives dead letters to their groups again: pending, free for any member; an epoch that was closed is open again.

    What an operator gave up stays so. Returns what is given again. Raises EntryNotFound where ``entry`` is no dead
    letter, StreamConflict where one cannot be given again.
    """
    letters = [
        letter
        for letter in list_bad(client, stream, epoch=epoch, group=group).dead
        if not letter.given_up and entry in (None, letter.entry)
    ]
    if entry is not None and ":" in entry:
        raise StreamConflict(
            f"{entry} names a sample, not an entry: a quarantined sample is a hole, settled for every group "
            "and for ever; mend its source, and the next epoch has it"
        )
    if entry is not None and not letters:
        raise EntryNotFound(
            f"entry {entry} is no dead letter of {stream.name!r}; `penstock bad list {stream.name}` names them"
        )
    return [letter for letter in letters if _retry(client, stream, letter, must=entry is not None)]


def _retry(client: Client, stream: Stream, letter: DeadLetter, *, must: bool) -> bool:
    manifest = load_manifest(client, stream, letter.epoch)
    record = load_roster(client, stream.partitions[0]).groups.get(letter.group)
    if record is not None and record.kind == ORDERED:
        if must:
            raise StreamConflict(
                f"group {letter.group!r} reads in order: its ranks have gone on with other samples in the place of "
                f"entry {letter.entry}; `penstock audit {stream.name} --repair` makes anew what is missing"
            )
        return False
    # first the epoch is owed again, everywhere: from then on no release can take what becomes pending
    for partition in stream.partitions:
        run_script(client, REOPEN, [partition.roster], [letter.group, letter.epoch])
    for partition in stream.partitions:
        keys = [
            partition.state(letter.epoch), partition.entries(letter.epoch), partition.dead(letter.epoch, letter.group)
        ]  # fmt: skip
        try:
            if run_script(client, RETRY, keys, [manifest.live_state, letter.group, letter.entry]) == 1:
                return True
        except ResponseError as error:
            if not is_gone(error):  # the group was dropped meanwhile, or reads in order
                raise
    if must:
        raise StreamConflict(
            f"entry {letter.entry} of epoch {letter.epoch} is gone, or its epoch abandoned: it cannot be given again; "
            f"`penstock audit {stream.name} --repair` makes it anew, `penstock bad drop` goes on without"
        )
    return False


def drop_bad(
    client: Client, stream: Stream, epoch: int, *, group: str | None, reason: str, entry: str | None = None
) -> list[DeadLetter]:
    """An operator's word that a group (None: every shared group) goes without what is dead or lost, or one entry.

    The samples become settled and are kept by identity and reason; an entry that no producer committed is deleted when
    every group drops it (an ordered group never meets one, and gives up nothing). Returns what was given up. Raises
    EntryNotFound, GroupNotFound, StreamConflict.
    """
    manifest = load_manifest(client, stream, epoch)
    groups = _groups(client, stream, epoch, group)
    done: list[DeadLetter] = []
    for name in groups:
        done += _drop_entries(client, stream, manifest, name, reason, entry, again=group is None)
        if entry is None:
            done += _drop_lost(client, stream, manifest, name, reason)
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
        for partition, survey in zip(stream.partitions, survey_epoch(client, stream, manifest), strict=True):
            balance_bytes(client, partition, survey, epoch)  # what is gone takes no room
    return done


def _drop_entries(
    client: Client, stream: Stream, manifest: Manifest, group: str, reason: str, entry: str | None, *, again: bool
) -> list[DeadLetter]:
    """Dead letters, or the one entry that is named: dead, pending, or gone.

    ``again``: also what this group gave up before and no index names; else it could never be deleted.
    """
    done = []
    for partition in stream.partitions:
        notes = load_notes(client, partition, manifest.epoch, group)
        dead = [name for name, note in notes.items() if not note.given_up or (again and note.shard < 0)]
        # pending before the records: of an epoch that has ended, what is in no record then no producer committed
        is_swept = entry is None and manifest.is_ended
        pending = list_pending(client, partition, manifest.epoch, group) if is_swept else []
        records = _records(client, stream, manifest, partition)
        strays = [one.entry_id for one in pending if one.entry_id not in records]
        wanted = [entry.encode()] if entry is not None else [*dead, *strays]
        if strays:  # but an entry that only lost its record is handed out as it is
            whole = {lost.found.encode() for lost in _missing(client, stream, manifest)}
            wanted = [entry_id for entry_id in wanted if entry_id not in whole]
        for entry_id in wanted:
            if entry_id in dead or _is_pending(client, partition, manifest.epoch, group, entry_id):
                shard, record = records.get(entry_id, (-1, None))
                why = f"{reason} ({notes[entry_id].why})" if entry_id in notes else reason
                done.append(_give_up(client, partition, manifest, group, entry_id, shard, record, why))
    return done


def _missing(client: Client, stream: Stream, manifest: Manifest) -> list[MissingRange]:
    audits = audit_stream(client, stream, epoch=manifest.epoch).epochs
    return audits[0].missing if audits else []


def _drop_lost(client: Client, stream: Stream, manifest: Manifest, group: str, reason: str) -> list[DeadLetter]:
    """What nobody will ever deliver to the group, by the audit."""
    audits = audit_stream(client, stream, epoch=manifest.epoch).epochs
    lost = audits[0].groups[group].lost_ranges if audits and group in audits[0].groups else []
    done = []
    for shard, first, end in lost:
        partition = stream.partition_of(shard)
        record = Record(end, b"", first, end - first, 0, ())
        done.append(_give_up(client, partition, manifest, group, b"", shard, record, reason))
    return done


def _give_up(
    client: Client, partition: PartitionKeys, manifest: Manifest, group: str, entry_id: bytes, shard: int,
    record: Record | None, why: str,
) -> DeadLetter:  # fmt: skip
    """``record`` has the identity; None where no index names the entry, which then settles nothing."""
    first, end = (record.first, record.end) if record else (0, 0)
    note = DeadNote(why[:500], server_ms(client), True, shard if record else -1, first, end)
    name = entry_id or f"{shard}:{first}-{end}".encode()
    holes = record.holes if record else ()
    spans = runs([offset for offset in range(first, end) if offset not in holes])
    keys = [
        partition.state(manifest.epoch), partition.entries(manifest.epoch), partition.dead(manifest.epoch, group),
        partition.ledger(manifest.epoch, group, max(shard, 0)),
    ]  # fmt: skip
    args: list[Arg] = [manifest.live_state, group, entry_id, name, write_note(note), len(spans)]
    args += [bound for span in spans for bound in span]
    if run_script(client, GIVE_UP, keys, args) != 1:
        raise StreamConflict(f"epoch {manifest.epoch} was abandoned or released: nothing of it is owed to anyone")
    return _letter(manifest.epoch, group, name, note)


def _delete_strays(client: Client, stream: Stream, epoch: int, done: list[DeadLetter]) -> None:
    for letter in done:
        if letter.shard is None:
            for partition in stream.partitions:
                client.xdel(partition.entries(epoch), letter.entry)
                for name in load_roster(client, partition).groups:
                    client.xack(partition.entries(epoch), name, letter.entry)
                    client.hdel(partition.dead(epoch, name), letter.entry)


# --- reading ----------------------------------------------------------------------------------------------------------


def _epochs(client: Client, stream: Stream, epoch: int | None) -> list[int]:
    return list(retained_epochs(client, stream)) if epoch is None else [load_manifest(client, stream, epoch).epoch]


def _quarantined(client: Client, partition: PartitionKeys, epoch: int) -> Iterator[Quarantined]:
    places = []
    for name, value in client.hgetall(partition.quarantine(epoch)).items():
        shard, _, offset = name.partition(b":")
        places.append(Quarantined(epoch, int(shard), int(offset), read_reason(value)))
    yield from sorted(places, key=lambda place: (place.shard, place.offset))


def read_reason(value: bytes) -> str:
    """Of a quarantined sample."""
    try:
        return str(json.loads(value)["why"])
    except (ValueError, TypeError, KeyError):
        return value.decode("utf-8", "replace")


def _letters(
    client: Client, stream: Stream, manifest: Manifest, partition: PartitionKeys, group: str | None
) -> Iterator[DeadLetter]:
    epoch = manifest.epoch
    by_group = {
        name: load_notes(client, partition, epoch, name)
        for name in load_roster(client, partition).groups
        if group in (None, name)
    }
    records = _records(client, stream, manifest, partition) if any(by_group.values()) else {}
    for name, notes in by_group.items():
        for entry_id, note in sorted(notes.items()):
            shard, record = records.get(entry_id, (-1, None))
            if record is not None and not note.given_up:
                yield _letter(epoch, name, entry_id, replace(note, shard=shard, first=record.first, end=record.end))
            else:
                yield _letter(epoch, name, entry_id, note)


def _letter(epoch: int, group: str, name: bytes, note: DeadNote) -> DeadLetter:
    entry = "" if b":" in name else name.decode("utf-8", "replace")
    shard = note.shard if note.shard >= 0 else None
    return DeadLetter(epoch, group, entry, shard, note.first, note.end, note.why, note.since_ms, note.given_up)


def _records(
    client: Client, stream: Stream, manifest: Manifest, partition: PartitionKeys
) -> dict[bytes, tuple[int, Record]]:
    """Entry id -> shard and record, of one partition: what an entry says of itself counts for nothing."""
    return {
        record.entry_id: (shard, record)
        for shard in begun_shards(client, stream, manifest)
        if stream.partition_of(shard) == partition
        for record in index_records(client, partition, manifest.epoch, shard)
        if record.entry_id
    }


def _is_pending(client: Client, partition: PartitionKeys, epoch: int, group: str, entry_id: bytes) -> bool:
    try:
        return bool(client.xpending_range(partition.entries(epoch), group, entry_id, entry_id, 1))
    except ResponseError as error:
        if is_gone(error):
            return False
        raise EntryNotFound(f"{entry_id.decode()!r} is no entry's id: they look like 1700000000000-0") from None


def _groups(client: Client, stream: Stream, epoch: int, group: str | None) -> list[str]:
    roster = load_roster(client, stream.partitions[0])
    if group is not None:
        require_group(client, stream, group)
    reading = {name: g for name, g in roster.groups.items() if g.first <= epoch and group in (None, name)}
    shared = [name for name, g in reading.items() if g.kind == SHARED]
    if reading and not shared:
        raise StreamConflict(
            f"group {min(reading)!r} reads in order: it passes over nothing; `penstock audit {stream.name} --repair` "
            "makes what is missing anew, or name a group that is not ordered"
        )
    if not reading:
        raise GroupNotFound(f"no group of {stream.name!r} reads epoch {epoch}: there is nobody to drop anything for")
    return shared


def _problem(stream: Stream, meta: bytes) -> str:
    if stream.spec is None:
        return "the stream has no spec"
    try:
        parse_header(meta, stream.spec)
    except BadEntry as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _pairs(flat: list[bytes | int]) -> Iterator[tuple[bytes, int]]:
    for name, size in zip(flat[::2], flat[1::2], strict=True):
        assert isinstance(name, bytes)
        yield name, int(size)
