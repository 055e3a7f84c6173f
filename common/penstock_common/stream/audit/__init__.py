"""The audit: manifest against shard indexes, entries and ledgers; what is lost, twice, or unexplained is named.

``survey`` reads the facts, ``judgement`` compares them, ``accounts`` is the answer.
"""

from __future__ import annotations

from penstock_common.stream.audit.accounts import AuditReport, EpochAudit, GroupAudit
from penstock_common.stream.audit.judgement import judge_epoch
from penstock_common.stream.audit.survey import Survey, survey_partition
from penstock_common.stream.groups.positions import starts_of
from penstock_common.stream.link.commands import Client
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest, load_manifest, retained_epochs
from penstock_common.stream.payloads import reader_of
from penstock_common.stream.streams import Stream, load_stream, read_counters

__all__ = ["AuditReport", "EpochAudit", "GroupAudit", "audit_stream", "survey_epoch"]


def audit_stream(client: Client, stream: Stream | str, *, epoch: int | None = None, deep: bool = False) -> AuditReport:
    """Audits every retained epoch, or one; ``deep`` also fetches every payload and verifies checksums.

    May run while the stream is written and read. Raises StreamNotFound, EpochNotFound.
    """
    found = load_stream(client, stream) if isinstance(stream, str) else stream
    numbers = list(retained_epochs(client, found)) if epoch is None else [load_manifest(client, found, epoch).epoch]
    audits = [audit for number in numbers if (audit := _audit_epoch(client, found, number, deep)) is not None]
    return AuditReport(found.name, audits, read_counters(client, found)[2])


def _audit_epoch(client: Client, stream: Stream, epoch: int, deep: bool) -> EpochAudit | None:
    """None where the epoch was released meanwhile."""
    manifest = find_manifest(client, stream, epoch)
    if manifest is None:
        listed = epoch in retained_epochs(client, stream)
        return EpochAudit(epoch, "none", None, findings=["it is listed, but has no manifest"]) if listed else None
    if stream.spec is None:
        return EpochAudit(epoch, manifest.state, manifest.samples)
    surveys = survey_epoch(client, stream, manifest, deep=deep)
    again = find_manifest(client, stream, epoch)
    if again is None or again.id != manifest.id or any(epoch in survey.roster.retiring for survey in surveys):
        return None
    return judge_epoch(stream.id, manifest, surveys)


def survey_epoch(client: Client, stream: Stream, manifest: Manifest, *, deep: bool = False) -> list[Survey]:
    """What each partition holds of an epoch; the stream has a spec."""
    assert stream.spec is not None
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
                client, stream, partition, manifest.epoch, sizes, starts, stream.spec, deep=deep, segments=segments
            )
        )
    return surveys
