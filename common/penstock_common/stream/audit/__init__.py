"""The audit: it compares manifest, shard indexes, entries and ledgers, and names what is lost, duplicated or
unexplained.

`survey` reads the facts, `judgement` compares them, `accounts` has the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress

from penstock_common.errors import DamagedKey
from penstock_common.stream.audit.accounts import AuditReport, EpochAudit, GroupAudit, MissingRange, UnreplicatedRange
from penstock_common.stream.audit.judgement import judge_epoch
from penstock_common.stream.audit.reconciliation import StepKind, plan_settled
from penstock_common.stream.audit.survey import EpochRosters, PartitionSurvey, read_indexes, survey_partition
from penstock_common.stream.commands import Client, parse_id
from penstock_common.stream.entries import IndexRecord, count_entries
from penstock_common.stream.groups.losses import Loss, losses_of_lost_epochs, noted_losses, resent_losses
from penstock_common.stream.groups.positions import starts_of
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest, load_manifest, retained_epochs
from penstock_common.stream.payloads import reader_of, why_unseen
from penstock_common.stream.streams import Stream, load_stream, read_counters, said_deleting

__all__ = [
    "AuditReport",
    "EpochAudit",
    "GroupAudit",
    "audit_stream",
    "find_missing_ranges",
    "find_unreplicated",
    "survey_epoch",
]


AuditProgress = Callable[[int, int], None]
"""A function of the epochs that were audited so far, and of all of them."""


def audit_stream(
    client: Client, stream: Stream | str, *, epoch: int | None = None, deep: bool = False,
    progress: AuditProgress = lambda done, total: None,
) -> AuditReport:  # fmt: skip
    """Audit every retained epoch, or one. ``deep`` also fetches every payload and verifies checksums.

    It may run while the stream is written and read. A damaged key is a finding. Raises StreamNotFound, EpochNotFound.
    """
    name, released = stream if isinstance(stream, str) else stream.name, ""
    try:
        found = load_stream(client, stream) if isinstance(stream, str) else stream
        if found.is_deleting:
            return AuditReport(name, [], released, deletion=said_deleting(name))
        released = read_counters(client, found)[2]
        lost = {n: losses for n, losses in losses_of_lost_epochs(client, found).items() if epoch in (None, n)}
        if epoch is None:
            numbers = sorted({*retained_epochs(client, found), *lost})
        else:
            numbers = [epoch if lost else _existing(client, found, epoch)]
    except DamagedKey as error:
        return AuditReport(name, [], released, damage=[str(error)])
    report = AuditReport(name, [], released, disagreements=_disagreements(client, found, epoch))
    rosters = EpochRosters(client)
    for done, number in enumerate(numbers):
        progress(done, len(numbers))
        try:
            audit = _audit_epoch(client, found, number, rosters, deep)
        except DamagedKey as error:
            audit = EpochAudit(number, "damaged", None, findings=[str(error)], is_damaged=True)
        if number in lost:
            audit = audit or EpochAudit(number, "lost", None)
            audit.add_losses(lost[number], "the server lost this epoch as it was")
        if audit is not None:
            report.epochs.append(audit)
    progress(len(numbers), len(numbers))
    if report.unseen:
        report.why_unseen = why_unseen(found)
    return report


def find_missing_ranges(client: Client, stream: Stream, epoch: int, *, deep: bool = False) -> list[MissingRange]:
    """Return what the audit of one epoch finds missing or damaged. Raises EpochNotFound."""
    audits = audit_stream(client, stream, epoch=epoch, deep=deep).epochs
    return audits[0].missing if audits else []


def _disagreements(client: Client, stream: Stream, epoch: int | None) -> list[str]:
    """Return what a reconciliation would repair, without what the audit of an epoch names, or what a job will do."""
    try:
        plan = plan_settled(client, stream)
    except DamagedKey:  # the audit of its epoch names it
        return []
    others = (StepKind.FINISH, StepKind.REOPEN, StepKind.NAME)
    return [str(step) for step in plan if step.kind not in others and (epoch is None or step.epoch in (-1, epoch))]


def _existing(client: Client, stream: Stream, epoch: int) -> int:
    """Return the epoch, even if its manifest is damaged. Raises EpochNotFound."""
    with suppress(DamagedKey):
        load_manifest(client, stream, epoch)
    return epoch


def _audit_epoch(client: Client, stream: Stream, epoch: int, rosters: EpochRosters, deep: bool) -> EpochAudit | None:
    """Audit one epoch. Returns None if it was released since."""
    manifest = find_manifest(client, stream, epoch)
    if manifest is None:
        listed = epoch in retained_epochs(client, stream)
        return EpochAudit(epoch, "none", None, findings=["it is listed, but has no manifest"]) if listed else None
    if stream.spec is None:
        audit = EpochAudit(epoch, manifest.state, manifest.samples)
        if count_entries(client, stream, epoch):
            audit.findings.append(f"{stream.keys.meta} has no spec, so its entries cannot be read")
        return audit
    surveys = survey_epoch(client, stream, manifest, rosters, deep=deep)
    again = find_manifest(client, stream, epoch)
    if again is None or again.id != manifest.id or any(epoch in survey.roster.retiring for survey in surveys):
        return None
    audit = judge_epoch(stream.id, manifest, surveys)
    losses, resent = noted_losses(client, stream, epoch), resent_losses(client, stream, epoch)
    index = {shard: records for survey in surveys for shard, records in survey.index.items()}
    made_again = [
        loss
        for loss in losses
        if is_made_again(manifest, loss, surveys)
        or is_held_by(resent.get(loss, set()), loss.first, loss.end, index.get(loss.shard, []))
    ]
    left = [loss for loss in losses if loss not in made_again]
    audit.add_losses(left, "the server lost its newest writes", made_again)
    audit.unreplicated.extend(unreplicated_ranges(client, stream, manifest, index))
    return audit


def unreplicated_ranges(
    client: Client, stream: Stream, manifest: Manifest, index: Mapping[int, Sequence[IndexRecord]]
) -> list[UnreplicatedRange]:
    """Return the offsets that were written while their server had no replica, by shard.

    The manifest has the times of the oldest and the newest such entry of each partition. An entry's id is its time.
    A record of bad samples alone has no entry. It counts as written so if all entries of the epoch were.

    Args:
        client: A client of the stream's servers.
        stream: The stream.
        manifest: The epoch.
        index: Shard -> its index records in order.
    """
    noted = {writes.partition: writes for writes in manifest.unreplicated}

    def is_noted(shard: int, record: IndexRecord) -> bool:
        writes = noted.get(stream.partition_of(shard).number)
        return writes is not None and writes.first_ms <= parse_id(record.entry_id)[0] <= writes.last_ms

    with_entry = {shard: [record for record in records if record.entry_id] for shard, records in index.items()}
    found = {shard: [one for one in records if is_noted(shard, one)] for shard, records in with_entry.items()}
    ranges: list[UnreplicatedRange] = []
    for shard, records in (index if noted and found == with_entry else found).items():
        if records:
            partition = stream.partition_of(shard)
            writes = noted.get(partition.number)
            server = client.node_of(partition.roster).server if writes is None else writes.server
            ranges.append(UnreplicatedRange(shard, records[0].first, records[-1].end, server))
    return sorted(ranges, key=lambda one: one.shard)


def find_unreplicated(client: Client, stream: Stream, epoch: int) -> list[UnreplicatedRange]:
    """Return `unreplicated_ranges` of an epoch, or none if it is gone. It reads indexes only if there are some."""
    manifest = find_manifest(client, stream, epoch)
    if manifest is None or not manifest.unreplicated:
        return []
    shards = list(begun_shards(client, stream, manifest))
    return unreplicated_ranges(client, stream, manifest, read_indexes(client, stream, manifest.epoch, shards))


def is_made_again(manifest: Manifest, loss: Loss, surveys: list[PartitionSurvey]) -> bool:
    """Return whether the samples of a loss are in the stream again.

    Only a source with a fingerprint is known to give the same samples for the same offsets. The samples that a feed or
    a manual writer wrote there since are others.
    """
    if not manifest.fingerprint:
        return False
    ends = [survey.index[loss.shard][-1].end for survey in surveys if survey.index.get(loss.shard)]
    return bool(ends) and ends[0] >= loss.end


def is_held_by(writers: Set[str], first: int, end: int, records: Sequence[IndexRecord]) -> bool:
    """Return whether the offsets [first, end) of a feed's shard are whole, and all of them are by these writers.

    A writer gives an offset one sample, however often it sends it. Another writer gives it another one.
    """
    at = first
    for record in records:
        if record.end <= at or record.first >= end:
            continue
        if record.first > at or record.writer not in writers:
            return False
        at = record.end
    return at >= end


def survey_epoch(
    client: Client, stream: Stream, manifest: Manifest, rosters: EpochRosters | None = None, *, deep: bool = False
) -> list[PartitionSurvey]:
    """Return what each partition holds of an epoch. The stream has a spec. ``rosters`` are those of other epochs."""
    rosters = rosters or EpochRosters(client)
    spec = stream.require_spec()
    shards = begun_shards(client, stream, manifest)
    starts = starts_of(manifest, shards)
    segments = reader_of(stream, must_see=deep)
    surveys = []
    for partition in stream.partitions:
        sizes = {
            s: manifest.sizes[s] if manifest.sizes else None for s in shards if stream.partition_of(s) == partition
        }
        surveys.append(
            survey_partition(
                client, stream, partition, manifest.epoch, sizes, starts, spec, rosters, deep=deep, segments=segments
            )
        )
    return surveys
