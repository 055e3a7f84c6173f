"""The facts for the audit: what the server holds of one epoch in one partition, as ids and headers without payloads.

`judgement` compares them. This file judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, UnsupportedVersion
from penstock_common.segments.reader import SegmentReader
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, EntryId, read_by_script, readable
from penstock_common.stream.entries import (
    PAGE,
    PAGE_BYTES,
    IndexRecord,
    index_records,
    is_believable,
    last_given,
    list_pending,
)
from penstock_common.stream.groups.dead_notes import DeadLetterNote, load_notes
from penstock_common.stream.groups.ledger import whole_ledgers
from penstock_common.stream.groups.positions import Positions, done_by_ranks, known_positions
from penstock_common.stream.groups.roster import ORDERED, Roster, load_roster, parse_roster
from penstock_common.stream.index import EpochIndexes, IndexRange
from penstock_common.stream.keys import LAST, PartitionKeys
from penstock_common.stream.payloads import whole_fields
from penstock_common.stream.streams import Stream
from penstock_common.wire.codec import decode, stored_bytes
from penstock_common.wire.header import Header, parse_header
from penstock_common.wire.limits import MAX_HEADER_BYTES, MAX_NUMBER
from penstock_common.wire.spec import Spec

_LIST_ENTRIES = load_script("list_entries")

Listed = tuple[bytes, bytes, int]
"""Entry id, header, payload bytes."""

INDEXES_AT_ONCE = 16
"""The shards whose first index records come in one answer, which is 2 MB at most."""
MOST_ENTRIES = 1000
LATEST: EntryId = (1 << 64, 0)
"""An id after every other: if the key of the entries is gone, or another program made it, no record is too new."""


@dataclass(frozen=True, slots=True)
class SurveyedEntry:
    """An entry that exists."""

    entry_id: bytes
    nbytes: int
    """Payload bytes without shapes, as the index counts them."""
    header: Header | None
    """The header, or None if it cannot be read. Then ``problem`` says why."""
    problem: str = ""
    is_gone: bool = False
    """Whether its payload is in a segment that is missing or too short. The entry then counts as deleted."""
    is_damaged: bool = False
    """Whether no reader can decode it. An entry of a later version is not damaged."""
    is_unseen: bool = False
    """Whether its payload is in a segment that this process cannot see."""


@dataclass(slots=True)
class GroupSurvey:
    """One group in one partition of an epoch."""

    last_delivered: EntryId | None
    """The id, or None if the entries key has no such consumer group."""
    pending: frozenset[bytes]
    dead: dict[bytes, str]
    done: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    """Shard -> one bit for each offset, set for what the group is done with."""
    given_up: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Shard -> the offsets [first, end) that an operator gave up."""
    is_ordered: bool = False
    """Whether it has positions instead of a consumer group and a ledger."""
    oversized: list[int] = field(default_factory=list)
    """Shards whose ledger is longer than the shard."""


@dataclass(slots=True)
class PartitionSurvey:
    """The facts about one partition of one epoch."""

    number: int
    state: str
    before: Roster
    """The roster, or what it says of the epoch, before everything else was read."""
    roster: Roster
    """The same after it, which marks what was trimmed in between."""
    newest: EntryId
    """The newest committed id at the beginning. What the index has after it may be too new to have been seen."""
    held: dict[bytes, SurveyedEntry]
    index: dict[int, list[IndexRecord]]
    """Shard -> its records in order."""
    quarantined: set[tuple[int, int]]
    """Pairs (shard, offset) of bad samples."""
    groups: dict[str, GroupSurvey]


class EpochRosters:
    """Reads what a roster says of one epoch, because it has fields for each retained epoch and group.

    A whole roster names the groups. It is read again when its generation shows that they may be others.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[PartitionKeys, Roster] = {}

    def load(self, partition: PartitionKeys, epoch: int) -> Roster:
        """Return the roster of now, at least with its groups and what it says of the epoch and its bytes."""
        if (known := self._known.get(partition)) is not None:
            names = ["gen", *(f"{kind}:{epoch}" for kind in "etxb")]
            names += [name for group in known.groups for name in (f"g:{group}", f"d:{group}:{epoch}")]
            values = zip(names, self._client.hmget(partition.roster, names), strict=True)
            fields = {name.encode(): value for name, value in values if value is not None}
            found = parse_roster(self._client, partition, fields)
            if (found.generation, found.groups.keys()) == (known.generation, known.groups.keys()):
                return found
        self._known[partition] = whole = load_roster(self._client, partition)
        return whole


def survey_partition(
    client: Client, stream: Stream, partition: PartitionKeys, epoch: int, sizes: dict[int, int | None],
    starts: dict[int, int], spec: Spec, rosters: EpochRosters, *, deep: bool, segments: SegmentReader | None = None,
) -> PartitionSurvey:  # fmt: skip
    """Read a partition so that a running epoch looks consistent: entries before the index, pending before ledgers.

    ``sizes`` has the partition's shards, with the planned size, or None to take what is committed. ``starts`` has the
    place where each begins in canonical order, as far as that is known.
    """
    before = rosters.load(partition, epoch)
    newest = last_given(client, partition, epoch).get(LAST, LATEST)
    held = {one.entry_id: one for one in _held(client, partition, epoch, spec, deep=deep, segments=segments)}
    index = read_indexes(client, stream, epoch, list(sizes))
    delivered = last_given(client, partition, epoch)
    lengths = {shard: _end(index[shard]) if size is None else size for shard, size in sizes.items()}
    groups: dict[str, GroupSurvey] = {}
    for name, record in before.groups.items():
        if record.first > epoch:
            continue
        listed = list_pending(client, partition, epoch, name) if name in delivered else []
        pending = frozenset(one.entry_id for one in listed)
        is_ordered = record.kind == ORDERED
        oversized: list[int] = []
        if is_ordered:
            positions = _positions(client, stream, epoch, name, before)
            done = {
                shard: done_by_ranks(positions, record, starts.get(shard), length) for shard, length in lengths.items()
            }
        else:
            ledgers = whole_ledgers(client, partition, epoch, name, lengths)
            done = {shard: bits for shard, (bits, _) in ledgers.items()}
            oversized = [
                shard
                for shard, (_, nbytes) in ledgers.items()
                if nbytes > (lengths[shard] + 7) // 8 and sizes[shard] is not None
            ]
        notes = load_notes(client, partition, epoch, name)
        dead = {entry_id: note.why for entry_id, note in notes.items() if not note.given_up}
        groups[name] = group = GroupSurvey(
            delivered.get(name), pending, dead, done, is_ordered=is_ordered, oversized=oversized
        )
        if is_ordered:
            _leave_out_bad(group, index)
        _take_given_up(group, notes.values())
    bad = _quarantined(client, partition, epoch)
    state: bytes | None = client.get(partition.state(epoch))
    roster = rosters.load(partition, epoch)
    return PartitionSurvey(
        partition.number,
        (state or b"none").decode("utf-8", "backslashreplace"),
        before,
        roster,
        newest,
        held,
        index,
        bad,
        groups,
    )


def _positions(client: Client, stream: Stream, epoch: int, group: str, roster: Roster) -> Positions:
    """Return the positions of an ordered group, which are beyond everything once it has closed the epoch."""
    if (group, epoch) in roster.closed:
        return Positions(MAX_NUMBER)
    return known_positions(client, stream, epoch, group)


def _take_given_up(group: GroupSurvey, notes: Iterable[DeadLetterNote]) -> None:
    for note in notes:
        if note.given_up and note.shard in group.done:
            group.given_up.setdefault(note.shard, []).append((note.first, note.end))
            if group.is_ordered:  # it has no bits that a discard would have set
                group.done[note.shard][note.first : note.end] = True


def _leave_out_bad(group: GroupSurvey, index: dict[int, list[IndexRecord]]) -> None:
    """Leave out bad samples: a position passes holes and dead letters, too, and neither was ever delivered."""
    for shard, records in index.items():
        for record in filter(is_believable, records):
            bits = group.done[shard][record.first : record.end]
            bits[np.array(record.holes, dtype=np.int64) - record.first] = False
            if record.entry_id in group.dead:
                bits[:] = False


def read_indexes(client: Client, stream: Stream, epoch: int, shards: list[int]) -> dict[int, list[IndexRecord]]:
    """Return shard -> its index records, with the first pages of many shards in one round trip."""
    found: dict[int, list[IndexRecord]] = {}
    for begin in range(0, len(shards), INDEXES_AT_ONCE):
        some = shards[begin : begin + INDEXES_AT_ONCE]
        pages = EpochIndexes(client, stream, epoch).read([IndexRange(shard, 0, PAGE) for shard in some]).records
        for shard, page in zip(some, pages, strict=True):
            found[shard] = page
            if len(page) >= PAGE:
                found[shard] += index_records(client, stream.partition_of(shard), epoch, shard, page[-1].end)
    return found


def _end(records: Sequence[IndexRecord]) -> int:
    return next((record.end for record in reversed(records) if is_believable(record)), 0)


@readable(lambda client, partition, epoch: partition.quarantine(epoch))
def _quarantined(client: Client, partition: PartitionKeys, epoch: int) -> set[tuple[int, int]]:
    """Return (shard, offset) of every bad sample."""
    parts = [name.partition(b":") for name in client.hkeys(partition.quarantine(epoch))]
    return {(int(shard), int(offset)) for shard, _, offset in parts}


def _held(
    client: Client, partition: PartitionKeys, epoch: int, spec: Spec, *, deep: bool, segments: SegmentReader | None
) -> Iterator[SurveyedEntry]:
    start, count = b"-", 4
    while True:
        page = _page(client, partition, epoch, start, count)
        problems = _checked(client, partition, epoch, spec, page, segments) if deep else {}
        for entry_id, meta, nbytes in page:
            header, error = _header(meta, spec)
            error = problems.get(entry_id, error)
            gone = _why_gone(header, segments)
            if gone and not client.xrange(partition.entries(epoch), entry_id, entry_id):
                continue  # the entry was removed since it was listed, and then its segment
            held = nbytes if header is None or header.ref is None else stored_bytes(header, header.ref.sizes)
            problem = "" if error is None else f"{type(error).__name__}: {error}"[:300]
            is_damaged = error is not None and not isinstance(error, UnsupportedVersion)
            is_unseen = segments is None and header is not None and header.ref is not None
            yield SurveyedEntry(entry_id, held, header, gone or problem, bool(gone), is_damaged, is_unseen)
        if len(page) < count:
            return
        start = b"(" + page[-1][0]
        mean = sum(nbytes + len(meta) for _, meta, nbytes in page) // len(page)
        count = max(1, min(MOST_ENTRIES, PAGE_BYTES // max(mean, 1)))


def _page(
    client: Client, partition: PartitionKeys, epoch: int, start: bytes, count: int
) -> list[tuple[bytes, bytes, int]]:
    reply = read_by_script(client, _LIST_ENTRIES, [partition.entries(epoch)], [start, count, MAX_HEADER_BYTES])
    return [(entry_id, meta, int(nbytes)) for entry_id, meta, nbytes in reply]


def _header(meta: bytes, spec: Spec) -> tuple[Header | None, BadEntry | None]:
    try:
        return parse_header(meta, spec, takes_refs=True), None
    except BadEntry as error:
        return None, error


def _why_gone(header: Header | None, segments: SegmentReader | None) -> str:
    """Return why a payload is missing, or '' if it is there or this process cannot see it."""
    if header is None or header.ref is None or segments is None:
        return ""
    try:
        segments.look(header.ref)
    except BadEntry as error:
        return str(error)
    return ""


def _checked(
    client: Client, partition: PartitionKeys, epoch: int, spec: Spec, page: list[Listed], segments: SegmentReader | None
) -> dict[bytes, BadEntry]:
    """Fetch payloads, and return entry id -> why it cannot be decoded."""
    problems: dict[bytes, BadEntry] = {}
    if not page:
        return problems
    for entry_id, fields in client.xrange(partition.entries(epoch), page[0][0], page[-1][0], count=len(page)):
        try:
            decode(whole_fields(list(fields.items()), spec, segments), spec, takes_refs=segments is not None)
        except BadEntry as error:
            problems[entry_id] = error
    return problems
