"""The audit's comparison, which is pure: what a manifest plans against what the partitions' surveys found.

`survey` reads the facts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.stream.audit.accounts import EpochAudit, GroupAudit, MissingRange
from penstock_common.stream.audit.survey import LATEST, GroupSurvey, PartitionSurvey, SurveyedEntry
from penstock_common.stream.commands import parse_id
from penstock_common.stream.entries import IndexRecord, is_believable
from penstock_common.stream.groups.ledger import runs
from penstock_common.stream.manifest import ABANDONED, PRODUCED, Manifest
from penstock_common.wire.block import offsets_of
from penstock_common.wire.header import Header

Mask = NDArray[np.bool_]
RANGES_NAMED = 5
"""The ranges that a finding names. It counts the rest."""


@dataclass(slots=True)
class _Span:
    """The samples that one entry holds, or held."""

    entry_id: bytes
    offsets: NDArray[np.int64]
    is_there: bool


def judge_epoch(stream_id: str, manifest: Manifest, surveys: Iterable[PartitionSurvey]) -> EpochAudit:
    """Compare what the manifest plans with what the partitions hold."""
    audit = EpochAudit(manifest.epoch, manifest.state, manifest.samples)
    for survey in surveys:
        _PartitionJudgement(stream_id, manifest, survey, audit).judge()
    return audit


class _PartitionJudgement:
    """The comparison for one partition. It writes into the epoch's audit."""

    def __init__(self, stream_id: str, manifest: Manifest, survey: PartitionSurvey, audit: EpochAudit) -> None:
        self._stream_id, self._manifest, self._survey, self._audit = stream_id, manifest, survey, audit
        self._epoch = manifest.epoch
        self._index = {shard: self._believable(shard, records) for shard, records in survey.index.items()}
        self._indexed = {r.entry_id: (s, r) for s, records in self._index.items() for r in records if r.entry_id}
        seen = max((parse_id(entry_id) for entry_id in survey.held), default=(0, 0))
        # if another program made the key of a complete epoch's entries again, and empty, no newer entry can come
        is_emptied = manifest.is_ended and survey.newest == (0, 0)
        self._newest = LATEST if is_emptied else max(seen, survey.newest)
        self._strays: dict[int, list[_Span]] = {}
        """Shard -> entries that no index record names, under the identity they claim."""
        self._missing: list[tuple[int, IndexRecord]] = []

    def judge(self) -> None:
        """Make all comparisons, in the best order for reading the findings."""
        self._check_registration()
        self._audit.count(unseen=sum(held.is_unseen for held in self._survey.held.values()))
        for entry_id, held in self._survey.held.items():
            if entry_id in self._indexed:
                self._check_header(held, *self._indexed[entry_id])
            else:
                self._name_stray(held)
        for shard, records in self._index.items():
            self._judge_shard(shard, records)
        self._check_bytes()
        self._check_groups()

    def _find(self, text: str) -> None:
        self._audit.findings.append(text)

    def _believable(self, shard: int, records: list[IndexRecord]) -> list[IndexRecord]:
        """Return the records whose numbers can be true. A forged record is reported, and then ignored."""
        kept: list[IndexRecord] = []
        for record in records:
            if is_believable(record):
                kept.append(record)
            else:
                self._find(f"shard {shard}: the index record {record.end}-0 is none that a producer writes")
        return kept

    # --- what the partition knows of the epoch ---

    def _check_registration(self) -> None:
        survey, manifest = self._survey, self._manifest
        wanted = ("abandoned" if manifest.state == ABANDONED else "live", manifest.id)
        if manifest.state == ABANDONED and survey.state.partition(":")[0] == "none":
            return
        if tuple(survey.state.split(":", 1)) != wanted:
            self._find(f"partition {survey.number} has the state {survey.state!r}, expected {':'.join(wanted)!r}")
        if survey.roster.epochs.get(self._epoch) != manifest.id:
            self._find(f"partition {survey.number} does not have the epoch on its roster")

    def _check_bytes(self) -> None:
        """Compare bytes.

        The bytes that retention counted show whether another program removed entries of a trimmed epoch.
        """
        before, after = (
            roster.epoch_bytes.get(self._epoch, 0) for roster in (self._survey.before, self._survey.roster)
        )
        if before != after or not self._manifest.is_ended:
            return
        expected = sum(r.nbytes for e, (_, r) in self._indexed.items() if e in self._survey.held)
        expected += sum(record.nbytes for _, record in self._missing)
        if after > expected:
            self._find(
                f"partition {self._survey.number} counts {after - expected} bytes more than its entries hold: entries "
                "that every group had acknowledged were deleted by other means than retention"
            )

    def _check_groups(self) -> None:
        for name, group in self._survey.groups.items():
            for shard in group.oversized:
                self._find(f"group {name}: the ledger of shard {shard} is longer than the shard")
            for entry_id, reason in sorted(group.dead.items()):
                where = self._indexed.get(entry_id)
                what = _identity(where[0], where[1]) if where else "which no index record names"
                shown = entry_id.decode("utf-8", "backslashreplace")
                self._find(f"group {name}: entry {shown} ({what}) is a dead letter: {reason[:200]}")

    # --- entries ---

    def _check_header(self, held: SurveyedEntry, shard: int, record: IndexRecord) -> None:
        name = f"entry {held.entry_id.decode()} ({_identity(shard, record)})"
        if held.problem and not held.is_gone:
            self._find(f"{name} cannot be read: {held.problem}")
        if held.header is None:
            return
        header = held.header
        said = (header.stream, header.epoch, header.shard, header.first, header.end, header.holes)
        if said != (self._stream_id, self._epoch, shard, record.first, record.end, record.holes):
            itself = f"stream {header.stream}, epoch {header.epoch}, {_identity(header.shard, header)}"
            self._find(f"{name} says of itself: {itself}, {len(header.holes)} holes")
        if held.nbytes != record.nbytes:
            self._find(f"{name} holds {held.nbytes} bytes, its index record says {record.nbytes}")

    def _name_stray(self, held: SurveyedEntry) -> None:
        """Report an entry that no commit wrote."""
        name, header = f"entry {held.entry_id.decode()} is in no index", held.header
        if header is None or held.problem:
            self._find(f"{name} and cannot be read: {held.problem}")
            return
        claims = f"{name}; it claims {_identity(header.shard, header)}"
        if header.stream != self._stream_id or header.epoch != self._epoch:
            self._find(f"{claims} of stream {header.stream} epoch {header.epoch}: it does not belong here")
            return
        records = self._index.get(header.shard)
        if records is None or header.end > self._limit(header.shard, records):
            self._find(f"{claims}, which the manifest does not plan")
            return
        owners = [r for r in records if r.entry_id and r.first < header.end and header.first < r.end]
        if owners:
            self._find(f"{claims}, which entry {owners[0].entry_id.decode()} holds: a duplicate")
        else:
            self._find(f"{claims}, which nobody else holds")
        span = _Span(held.entry_id, offsets_of(header.first, header.end, header.holes), is_there=True)
        self._strays.setdefault(header.shard, []).append(span)

    def _limit(self, shard: int, records: list[IndexRecord]) -> int:
        planned = self._manifest.shard_size(shard)
        return planned if self._manifest.sizes is not None else max(planned, records[-1].end if records else 0)

    # --- shards ---

    def _judge_shard(self, shard: int, records: list[IndexRecord]) -> None:
        end = max((record.end for record in records), default=0)
        sizes, done = self._manifest.sizes, self._manifest.done
        planned = sizes[shard] if sizes is not None else done.get(shard, end)
        strays = self._strays.get(shard, [])  # an open epoch's shard that lost its index has them beyond its end
        length = max(planned, end, *(int(span.offsets[-1]) + 1 for span in strays if len(span.offsets)))
        if end > planned:
            late = f"offsets {planned}-{end - 1} came after the epoch was closed, and readers refuse them"
            self._find(f"shard {shard} is committed up to {end}, its manifest plans {planned}: {late}")
        writers = sorted({record.writer for record in records if record.writer})
        if len(writers) > 1:
            named = ", ".join(writers[:RANGES_NAMED])
            self._find(
                f"shard {shard} has records of {len(writers)} writers ({named}): the server gave it out twice, and "
                "samples of one of them may be missing"
            )
        given_up = self._given_up(shard, length)
        covered = self._check_tiling(shard, records, given_up)
        if self._manifest.state == PRODUCED or shard in self._manifest.done:
            absent = ~covered[:planned]
            self._name(f"shard {shard}: never committed", absent & ~given_up[:planned])
            for first, end in runs(np.flatnonzero(absent)):
                self._audit.missing.extend(self._gap(shard, first, end))
        holes = np.zeros(length, dtype=bool)
        for record in records:
            holes[list(record.holes)] = True
        self._check_quarantine(shard, holes)

        spans = [self._span(shard, record) for record in records if record.entry_id] + strays
        copies = np.zeros(length, dtype=np.int32)
        for span in spans:
            copies[span.offsets] += 1
        self._audit.count(
            bad=int(holes.sum()), produced=int((covered & ~holes).sum()), duplicate=int((copies > 1).sum())
        )
        self._judge_groups(shard, spans, holes, covered, length)

    def _given_up(self, shard: int, length: int) -> Mask:
        """Return the samples that an operator gave up for at least one group and that every group is done with.

        They need no other finding.
        """
        given_up, done = np.zeros(length, dtype=bool), np.ones(length, dtype=bool)
        for group in self._survey.groups.values():
            given_up |= _ranges_mask(group.given_up.get(shard, []), length)
            done &= _padded(group.done[shard], length)
        return given_up & done

    def _check_tiling(self, shard: int, records: list[IndexRecord], given_up: Mask) -> Mask:
        covered = np.zeros(len(given_up), dtype=bool)
        at = 0
        for record in records:
            if record.first > at and given_up[at : record.first].all():
                pass
            elif record.first > at and record is not records[0]:
                self._find(f"shard {shard}: the index has a gap, offsets {at}-{record.first - 1} are in no record")
            elif record.first > at:
                self._find(f"shard {shard}: the index begins at offset {record.first}")
            elif record.first < at:
                self._find(f"shard {shard}: the index has offsets {record.first}-{at - 1} twice")
            if record.first + record.count + len(record.holes) != record.end:
                self._find(f"shard {shard}: the index record {_identity(shard, record)} counts {record.count} samples")
            covered[record.first : record.end] = True
            at = max(at, record.end)
        return covered

    def _check_quarantine(self, shard: int, holes: Mask) -> None:
        named = np.zeros(len(holes), dtype=bool)
        offsets = [offset for s, offset in self._survey.quarantined if s == shard]
        named[[offset for offset in offsets if offset < len(holes)]] = True
        self._name(f"shard {shard}: holes without a reason in the quarantine", holes & ~named)
        if self._manifest.is_ended:
            self._name(f"shard {shard}: quarantined without being a hole", named & ~holes)

    def _span(self, shard: int, record: IndexRecord) -> _Span:
        held = self._survey.held.get(record.entry_id)
        is_gone = held is not None and held.is_gone
        is_there = (held is not None and not is_gone) or parse_id(record.entry_id) > self._newest
        offsets = offsets_of(record.first, record.end, record.holes)
        lost = MissingRange(shard, record.first, record.end, record.holes, record.entry_id.decode())
        if is_gone or (not is_there and not self._is_rightly_trimmed(shard, record)):
            if held is None:
                self._missing.append((shard, record))
            is_given_up = bool(self._given_up(shard, record.end)[offsets].all())
            # what a dead letter's own note gave up would count as delivered once a repair removes the note
            if held is None or not is_given_up:
                self._audit.missing.append(lost)
            if is_given_up:
                return _Span(record.entry_id, offsets, is_there)
            name = f"entry {record.entry_id.decode()} ({_identity(shard, record)})"
            if held is not None:
                self._find(f"{name} has no payload any more: {held.problem}")
            else:
                self._find(f"{name} is in the index and not in the stream: it was deleted, and not by retention")
        elif not is_there:
            self._audit.count(trimmed=1)
        elif held is not None and held.is_damaged and not self._given_up(shard, record.end)[offsets].all():
            self._audit.missing.append(lost)  # `_check_header` names it
        return _Span(record.entry_id, offsets, is_there)

    def _gap(self, shard: int, first: int, end: int) -> list[MissingRange]:
        """Return the ranges that no record names: entries that claim parts of them, and the ranges between those."""
        parts: list[MissingRange] = []
        for span in sorted(self._strays.get(shard, []), key=lambda span: span.entry_id):
            header = self._survey.held[span.entry_id].header
            assert header is not None  # a stray without a header is not kept
            is_free = all(header.end <= part.first or part.end <= header.first for part in parts)
            if first <= header.first and header.end <= end and is_free:
                found = span.entry_id.decode()
                parts.append(MissingRange(shard, header.first, header.end, header.holes, found=found))
        bad = sorted(offset for s, offset in self._survey.quarantined if s == shard)
        rising, at = sorted(parts, key=lambda part: part.first), first
        for part in [*rising, MissingRange(shard, end, end)]:
            if at < part.first:
                holes = tuple(offset for offset in bad if at <= offset < part.first)
                parts.append(MissingRange(shard, at, part.first, holes))
            at = part.end
        return sorted(parts, key=lambda part: part.first)

    def _is_rightly_trimmed(self, shard: int, record: IndexRecord) -> bool:
        """Return whether retention removed it.

        Retention marks the epoch first, and removes only what every group that holds data is done with.
        """
        if self._epoch not in self._survey.roster.trimmed:
            return False
        offsets = offsets_of(record.first, record.end, record.holes)
        for name, group in self._survey.groups.items():
            known = self._survey.roster.groups.get(name)
            if known is None or not known.holds or record.entry_id in group.dead:
                continue
            if not _padded(group.done[shard], record.end)[offsets].all():
                return False
        return True

    # --- groups ---

    def _judge_groups(self, shard: int, spans: list[_Span], holes: Mask, covered: Mask, length: int) -> None:
        expected = ~holes if self._manifest.state == PRODUCED else covered & ~holes
        there = np.zeros(length, dtype=bool)
        for span in spans:
            if span.is_there:
                there[span.offsets] = True
        lost = np.zeros(length, dtype=bool)
        if self._manifest.state == ABANDONED:  # an abandoned epoch ends with the samples that it has
            expected[:] = False
        for name, group in self._survey.groups.items():
            total = self._audit.groups.setdefault(name, GroupAudit())
            lost |= self._judge_group(shard, name, group, total, spans, expected, there, covered)
        late = [name for name, g in self._survey.roster.groups.items() if g.first > self._epoch]
        for name in late:
            total = self._audit.groups.setdefault(name, GroupAudit())
            total.count(not_offered=int((covered & ~holes).sum()))
        if not self._survey.groups:
            trimmed = np.zeros(length, dtype=bool)
            for span in spans:
                trimmed[span.offsets] |= not span.is_there and self._epoch in self._survey.roster.trimmed
            lost = expected & ~there & ~trimmed
        self._audit.count(lost=int(lost.sum()))

    def _judge_group(
        self, shard: int, name: str, group: GroupSurvey, total: GroupAudit, spans: list[_Span], expected: Mask,
        there: Mask, covered: Mask,
    ) -> Mask:  # fmt: skip
        done = _padded(group.done[shard], len(expected))
        dead, pending, unread = (np.zeros(len(expected), dtype=bool) for _ in range(3))
        for span in spans:
            if span.entry_id in group.dead:
                dead[span.offsets] = True
            elif span.is_there and span.entry_id in group.pending:
                pending[span.offsets] = True
            elif span.is_there and _is_unread(span, group):
                unread[span.offsets] = True
        claimed = covered.copy()
        for span in spans:
            claimed[span.offsets] = True
        given_up = _ranges_mask(group.given_up.get(shard, []), len(expected)) & done
        if self._manifest.is_ended:  # otherwise it may have been committed and acknowledged since the index was read
            self._name(
                f"group {name}: shard {shard}: acknowledged, though never committed", done & ~claimed & ~given_up
            )
        open_ = expected & ~done
        discarded = int((given_up & expected).sum())
        total.count(
            delivered=int((done & claimed & ~given_up).sum()),
            given_up=discarded,
            dead=discarded + int((open_ & dead).sum()),
            pending=int((open_ & pending & ~dead).sum()),
            unread=int((open_ & unread & ~dead & ~pending).sum()),
        )
        open_ &= ~(dead | pending | unread)
        known = self._survey.roster.groups.get(name)
        if known is None:  # dropped since
            open_[:] = False
        elif not known.holds and known.lost and known.lost[0] <= self._epoch <= known.lost[1]:
            total.count(released=int((open_ & ~there).sum()))
            open_ &= there
        total.count_lost(shard, runs(np.flatnonzero(open_)))
        self._name(f"group {name}: shard {shard}: lost", open_)
        return open_

    def _name(self, what: str, offsets: Mask) -> None:
        """Report a finding that names ranges, if there are any."""
        ranges = runs(np.flatnonzero(offsets))
        if ranges:
            named = ", ".join(_range(lo, hi) for lo, hi in ranges[:RANGES_NAMED])
            more = f" and {len(ranges) - RANGES_NAMED} more ranges" if len(ranges) > RANGES_NAMED else ""
            self._find(f"{what}: offsets {named}{more} ({int(offsets.sum())} samples)")


def _is_unread(span: _Span, group: GroupSurvey) -> bool:
    """Return whether it was given to no member yet.

    An ordered group is given nothing: it acknowledges what it has read.
    """
    if group.is_ordered:
        return True
    return group.last_delivered is not None and parse_id(span.entry_id) > group.last_delivered


def _range(lo: int, hi: int) -> str:
    return f"{lo}" if hi - lo == 1 else f"{lo}-{hi - 1}"


def _identity(shard: int, what: IndexRecord | Header) -> str:
    return f"shard {shard} offsets {_range(what.first, what.end)}"


def _ranges_mask(ranges: Iterable[tuple[int, int]], length: int) -> Mask:
    mask = np.zeros(length, dtype=bool)
    for first, end in ranges:
        mask[max(first, 0) : max(end, 0)] = True
    return mask


def _padded(bits: Mask, length: int) -> Mask:
    """Return the bits of the first ``length`` offsets."""
    return np.pad(bits[:length], (0, max(0, length - len(bits))))
