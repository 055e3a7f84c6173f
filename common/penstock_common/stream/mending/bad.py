"""Bad samples and dead letters: they are listed, shown and given again. `drop` discards them.

Quarantined samples are holes, with which every group is done for ever. Dead letters belong to one group. Nothing here
decodes a payload or believes a number in an entry: identities come from the shard indexes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from redis.exceptions import ResponseError

from penstock_common.errors import BadEntry, EntryNotFound, StreamConflict
from penstock_common.segments.folder import INLINE
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, readable, run_script
from penstock_common.stream.entries import IndexRecord, describe_entry, index_records, is_gone
from penstock_common.stream.groups.dead_notes import DeadLetterNote, load_notes
from penstock_common.stream.groups.roster import ORDERED, find_group, load_roster, reopen_for_group, require_group
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, begun_shards, load_manifest, retained_epochs
from penstock_common.stream.streams import Stream
from penstock_common.wire.header import parse_header

_RETRY_DEAD_LETTER = load_script("retry_dead_letter")

LOOKED_AT, KINDS_SHOWN = 1000, 5
"""The bad samples of an epoch and partition whose reasons are compared, and the kinds of reasons that are shown."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A sample that its source could not make."""

    epoch: int
    shard: int
    offset: int
    why: str
    """The reason, which names the source's file or item."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry, or samples, that one group continues without."""

    epoch: int
    group: str
    entry: str
    """The id of the entry, or empty for samples that were given up and have no entry."""
    shard: int | None
    """The shard, or None if no index names the entry: no producer wrote it, or its record is lost."""
    first: int
    end: int
    why: str
    since_ms: int
    """The server's time, or 0 if it was not noted."""
    given_up: bool
    """Whether an operator decided it."""


@dataclass(slots=True)
class BadReport:
    """The bad samples and dead letters of some epochs."""

    quarantined: list[Quarantined] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EntryView:
    """An entry, as far as it can be shown without decoding it."""

    epoch: int
    entry: str
    shard: int | None
    """The shard that the index names."""
    first: int
    end: int
    header: str
    """The header as it is, in ASCII, at most `SHOWN_HEADER` characters, or empty if there is none."""
    problem: str
    """The reason why the header cannot be read, or empty."""
    fields: list[tuple[str, int]]
    """Name and bytes of each field."""
    dead_for: list[DeadLetter]


SHOWN_HEADER = 4000


def list_bad(client: Client, stream: Stream, *, epoch: int | None = None, group: str | None = None) -> BadReport:
    """Return bad samples and dead letters of every retained epoch, or of one. Raises EpochNotFound, GroupNotFound."""
    if group is not None:
        require_group(client, stream, group)
    found = BadReport()
    groups = {partition: load_roster(client, partition).groups for partition in stream.partitions}
    for number in retained_epochs(client, stream) if epoch is None else [epoch]:
        manifest = load_manifest(client, stream, number)
        found.quarantined.extend(list_quarantined(client, stream, number))
        for partition in stream.partitions:
            asked = [name for name in groups[partition] if group in (None, name)]
            found.dead.extend(_letters(client, stream, manifest, partition, asked))
    return found


def list_quarantined(client: Client, stream: Stream, epoch: int) -> Iterator[Quarantined]:
    """Yield the bad samples of an epoch."""
    for partition in stream.partitions:
        yield from _quarantined(client, partition, epoch)


def show_entry(client: Client, stream: Stream, epoch: int, entry: str) -> EntryView:
    """Return header and sizes of an entry. No payload leaves the server. Raises EntryNotFound."""
    manifest = load_manifest(client, stream, epoch)
    letters = [letter for letter in list_bad(client, stream, epoch=epoch).dead if letter.entry == entry]
    for partition in stream.partitions:
        try:
            reply = describe_entry(client, partition, epoch, entry)
        except ResponseError:
            raise EntryNotFound(f"{entry!r} is no entry's id: they look like 1700000000000-0") from None
        if reply:
            shard, record = records_by_entry(client, stream, manifest, partition).get(entry.encode(), (None, None))
            return EntryView(
                epoch, entry, shard, record.first if record else 0, record.end if record else 0,
                _shown(reply[0])[:SHOWN_HEADER], _problem(stream, reply[0]),
                [(_shown(name), int(size)) for name, size in zip(reply[1::2], reply[2::2], strict=True)],
                letters,
            )  # fmt: skip
    raise EntryNotFound(
        f"epoch {epoch} of {stream.name!r} has no entry {entry}: it was deleted, or trimmed; "
        f"`penstock bad list {stream.name}` names those there are"
    )


def retry_dead(
    client: Client, stream: Stream, *, epoch: int | None = None, group: str | None = None, entry: str | None = None
) -> list[DeadLetter]:
    """Give dead letters to their groups again: they are pending, and any member may claim them.

    A group that had closed the epoch reads it again. Discarded samples stay discarded. Returns the dead letters that
    are given again. Raises EntryNotFound if ``entry`` is no dead letter, and StreamConflict if one cannot be given
    again.
    """
    letters = [
        letter
        for letter in list_bad(client, stream, epoch=epoch, group=group).dead
        if not letter.given_up and entry in (None, letter.entry)
    ]
    if entry is not None and ":" in entry:
        raise StreamConflict(
            f"{entry} names a sample, not an entry: a quarantined sample is a hole, done for every group "
            "and for ever; fix its source, and the next epoch has it"
        )
    if entry is not None and not letters:
        raise EntryNotFound(
            f"entry {entry} is no dead letter of {stream.name!r}; `penstock bad list {stream.name}` names them"
        )
    return [letter for letter in letters if _retry(client, stream, letter, must=entry is not None)]


def _retry(client: Client, stream: Stream, letter: DeadLetter, *, must: bool) -> bool:
    manifest = load_manifest(client, stream, letter.epoch)
    record = find_group(client, stream.partitions[0], letter.group)
    if record is not None and record.kind == ORDERED:
        if must:
            raise StreamConflict(
                f"group {letter.group!r} reads in order: its ranks have gone on with other samples in the place of "
                f"entry {letter.entry}; `penstock audit {stream.name} --deep --repair SOURCE...` makes again what is "
                "damaged"
            )
        return False
    # first every partition notes that the epoch is needed: from then on no release can take what becomes pending
    reopen_for_group(client, stream, letter.group, letter.epoch)
    for partition in stream.partitions:
        keys = [
            partition.state(letter.epoch), partition.entries(letter.epoch), partition.dead(letter.epoch, letter.group)
        ]  # fmt: skip
        try:
            if run_script(client, _RETRY_DEAD_LETTER, keys, [manifest.live_state, letter.group, letter.entry]) == 1:
                return True
        except ResponseError as error:
            if not is_gone(error):  # the group was dropped since, or reads in order
                raise
    if must:
        raise StreamConflict(
            f"entry {letter.entry} of epoch {letter.epoch} is gone, or its epoch abandoned: it cannot be given again; "
            f"`penstock audit {stream.name} --repair SOURCE...` makes it again, "
            f"`penstock bad drop {stream.name} {letter.epoch} --group {letter.group}` goes on without"
        )
    return False


# --- reading ----------------------------------------------------------------------------------------------------------


@readable(lambda client, partition, epoch: partition.quarantine(epoch))
def _quarantined(client: Client, partition: PartitionKeys, epoch: int) -> list[Quarantined]:
    found = []
    for name, value in client.hgetall(partition.quarantine(epoch)).items():
        shard, _, offset = name.partition(b":")
        found.append(Quarantined(epoch, int(shard), int(offset), read_reason(value)))
    return sorted(found, key=lambda one: (one.shard, one.offset))


def kinds_of_bad(client: Client, stream: Stream, epoch: int) -> list[dict[str, Any]]:
    """Return the most frequent reasons among some bad samples: how many have each, and one of them in full.

    Reasons that differ only in the sample's name and in numbers are alike.
    """
    counted: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for partition in stream.partitions:
        _, page = client.hscan(partition.quarantine(epoch), 0, count=LOOKED_AT)
        for value in islice(page.values(), LOOKED_AT):
            reason = read_reason(value)
            kind = re.sub(r"\d+", "#", reason.partition(": ")[2] or reason)
            counted[kind] += 1
            examples.setdefault(kind, reason)
    return [{"samples": count, "such_as": examples[kind]} for kind, count in counted.most_common(KINDS_SHOWN)]


def read_reason(value: bytes) -> str:
    """Return the reason of a quarantined sample."""
    try:
        return str(json.loads(value)["why"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return value.decode("utf-8", "replace")


def _letters(
    client: Client, stream: Stream, manifest: Manifest, partition: PartitionKeys, groups: Iterable[str]
) -> Iterator[DeadLetter]:
    epoch = manifest.epoch
    by_group = {name: load_notes(client, partition, epoch, name) for name in groups}
    records = records_by_entry(client, stream, manifest, partition) if any(by_group.values()) else {}
    for name, notes in by_group.items():
        for entry_id, note in sorted(notes.items()):
            shard, record = records.get(entry_id, (-1, None))
            if record is not None and not note.given_up:
                yield letter_of(epoch, name, entry_id, replace(note, shard=shard, first=record.first, end=record.end))
            else:
                yield letter_of(epoch, name, entry_id, note)


def letter_of(epoch: int, group: str, name: bytes, note: DeadLetterNote) -> DeadLetter:
    """Return a note as it is shown. ``name`` is its field."""
    entry = "" if b":" in name else name.decode("utf-8", "replace")
    shard = note.shard if note.shard >= 0 else None
    return DeadLetter(epoch, group, entry, shard, note.first, note.end, note.why, note.since_ms, note.given_up)


def records_by_entry(
    client: Client, stream: Stream, manifest: Manifest, partition: PartitionKeys
) -> dict[bytes, tuple[int, IndexRecord]]:
    """Return entry id -> shard and record, of one partition. What an entry says of itself does not count."""
    return {
        record.entry_id: (shard, record)
        for shard in begun_shards(client, stream, manifest)
        if stream.partition_of(shard) == partition
        for record in index_records(client, partition, manifest.epoch, shard)
        if record.entry_id
    }


def _problem(stream: Stream, meta: bytes) -> str:
    if stream.spec is None:
        return "the stream has no spec"
    try:
        parse_header(meta, stream.spec, takes_refs=stream.payload != INLINE)
    except BadEntry as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _shown(value: bytes) -> str:
    return ascii(value.decode("utf-8", "backslashreplace"))[1:-1]
