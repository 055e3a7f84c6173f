"""Exporting: copy a stream's epochs to files, bit-exact, with the holes and their reasons.

A replay's lease holds an epoch while it is copied. Each entry is verified as it is read. An epoch counts once all of it
is on the disk. The way back is the producer's `write/importer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock_common.errors import BadEntry, BadExport, EpochIncomplete
from penstock_common.segments.exports import EXPORT_BYTES, ExportWriter, exporting
from penstock_common.segments.reader import SegmentReader
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import Record
from penstock_common.stream.manifest import PRODUCED, retained_epochs
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.payloads import entry_fields, reader_of
from penstock_common.stream.streams import Stream, load_stream
from penstock_common.tuning import LEASE_S
from penstock_common.wire.codec import Fields, decode
from penstock_common.wire.export import ExportContents, ExportedEpoch
from penstock_common.wire.header import without_ref
from penstock_consumer.replay.retained import RetainedEpoch

Progress = Callable[[int, int, int], None]
"""A function of an epoch, its payload bytes copied so far, and all of its payload bytes."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export."""

    path: Path
    contents: ExportContents
    new: tuple[int, ...]
    """The epochs that were copied."""
    kept: tuple[int, ...]
    """The epochs that an earlier export to the same folder had copied."""


def export_stream(
    client: Client,
    name: str,
    path: str | Path,
    *,
    epochs: Sequence[int] | None = None,
    file_bytes: int = EXPORT_BYTES,
    progress: Progress = lambda epoch, done, total: None,
) -> ExportResult:
    """Copy produced epochs to a folder: a new one, or one with an earlier export of the stream.

    Epochs that were finished before an error stay, and the same call continues from there.

    Args:
        client: a connection to the stream's server.
        name: the stream's name.
        path: the folder.
        epochs: the numbers of the epochs. None means all produced epochs that are retained.
        file_bytes: the size after which a file takes no further record.
        progress: called after each entry.

    Raises:
        BadExport: the folder holds something else, or cannot be written.
        StreamNotFound: there is no such stream.
        EpochNotFound: there is no such epoch.
        EpochIncomplete: an epoch is not produced yet.
        ReplayTruncated: retention removed a part of an epoch.
        BadEntry: an entry is damaged.

    Example:
        >>> export_stream(client, "digits", "digits-export").new
        (0, 1)
    """
    stream = load_stream(client, name)
    if stream.spec is None:
        raise BadExport(f"stream {name!r} has no samples yet: there is nothing to export")
    wanted = sorted(set(epochs)) if epochs is not None else _produced(client, stream)
    contents = ExportContents(stream.name, stream.id, stream.spec, stream.info, len(stream.partitions))
    with exporting(path, contents, file_bytes=file_bytes) as writer:
        kept = [epoch for epoch in wanted if writer.contents.find(epoch)]
        new = [epoch for epoch in wanted if epoch not in kept]
        for epoch in new:
            note = _copied(client, stream, epoch, writer, progress)
            both = sorted((*writer.contents.epochs, note), key=lambda one: one.epoch)
            writer.finish(replace(writer.contents, epochs=tuple(both)))
        return ExportResult(writer.path, writer.contents, tuple(new), tuple(kept))


def _produced(client: Client, stream: Stream) -> list[int]:
    states = retained_epochs(client, stream)
    found = [epoch for epoch, state in states.items() if state == PRODUCED]
    if not found:
        there = ", ".join(f"{epoch} ({state})" for epoch, state in states.items()) or "none"
        raise EpochIncomplete(f"stream {stream.name!r} has no produced epoch to export; epochs there: {there}")
    return found


def _copied(client: Client, stream: Stream, epoch: int, writer: ExportWriter, progress: Progress) -> ExportedEpoch:
    held = RetainedEpoch(client, stream, epoch, LEASE_S)
    try:
        done = 0
        writer.begin(epoch)
        progress(epoch, 0, held.nbytes)
        for fields, record in _entries(client, held):
            held.raise_lost()
            writer.append(fields)
            done += record.nbytes
            progress(epoch, done, held.nbytes)
        holes = [(shard, offset) for shard, record in held.records() for offset in record.holes]
        why = {(bad.shard, bad.offset): bad.why for bad in list_bad(client, stream, epoch=epoch).quarantined}
        manifest = held.manifest
        return ExportedEpoch(
            epoch, manifest.kind, manifest.seed, manifest.fingerprint,
            tuple(manifest.shard_size(shard) for shard in manifest.shards()), held.samples, held.nbytes, writer.files(),
            tuple((shard, offset, why.get((shard, offset), "")) for shard, offset in holes),
        )  # fmt: skip
    finally:
        held.let_go()


def _entries(client: Client, held: RetainedEpoch) -> Iterator[tuple[Fields, Record]]:
    """Yield the epoch's entries in canonical order and in their inline form, each verified. Raises BadEntry."""
    segments = reader_of(held.stream)
    try:
        for shard, record in held.records():
            if record.entry_id:
                yield _verified(client, held, shard, record, segments), record
    finally:
        if segments is not None:
            segments.close()


def _verified(
    client: Client, held: RetainedEpoch, shard: int, record: Record, segments: SegmentReader | None
) -> Fields:
    stream, epoch = held.stream, held.epoch
    fields = entry_fields(client, stream, epoch, shard, record.entry_id, segments)
    if fields is None:
        raise held.truncated(record)
    header, _ = decode(fields, stream.require_spec(), takes_refs=segments is not None)
    said = (header.stream, header.epoch, header.shard, header.first, header.end, header.holes)
    if said != (stream.id, epoch, shard, record.first, record.end, record.holes):
        raise BadEntry(
            f"the index says that entry {record.entry_id.decode()} has offsets {record.first}-{record.end - 1} of "
            f"shard {shard}, it says {header.first}-{header.end - 1} of {header.shard}: `penstock audit {stream.name}`"
        )
    meta = bytes(fields[0][1])
    return [(fields[0][0], meta if header.ref is None else without_ref(meta)), *fields[1:]]
