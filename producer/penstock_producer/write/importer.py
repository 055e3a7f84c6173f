"""Importing: exported epochs into a stream, bit-exact and once, also after interruptions.

Epochs keep their numbers, shards, offsets, holes with their reasons, and blocks with their checksums. The stream has an
id of its own. Files are checked before anything is written, because their contents are not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock_common.errors import BadEntry, BadExport, EpochAbandoned, ShardMismatch, StreamConflict, TooLarge
from penstock_common.segments.exports import ExportedEpoch, ExportFolder, ExportProgress, complete_epoch
from penstock_common.segments.reader import ScannedRecord, SegmentReader
from penstock_common.settings import Settings
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord, index_records
from penstock_common.stream.groups.roster import Roster, load_roster
from penstock_common.stream.manifest import (
    ABANDONED,
    PRODUCED,
    Manifest,
    begun_shards,
    find_manifest,
    open_epoch,
    retained_epochs,
)
from penstock_common.stream.payloads import entry_fields, entry_header, reader_of
from penstock_common.stream.servers.budgets import default_budget
from penstock_common.stream.streams import Stream, find_stream
from penstock_common.tuning import Tuning
from penstock_common.waiting import Notify, to_stderr
from penstock_common.wire.block import Block
from penstock_common.wire.codec import decode, digest_of, encode
from penstock_common.wire.limits import MAX_HOLES
from penstock_common.wire.spec import META_FIELD
from penstock_producer.write.payloads import default_capacity
from penstock_producer.write.shard import ShardWriter
from penstock_producer.write.writer import Writer, WriterHooks

SPARE = 1.3
"""A new stream's budget is this multiple of the imported bytes, because a writer waits when a budget is nearly full."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The result of an import."""

    stream: str
    new: tuple[int, ...]
    """The epochs that the import added samples to."""
    kept: tuple[int, ...]
    """The epochs that the stream already had, with the same samples."""
    samples: int
    """The good samples in all of these epochs."""
    nbytes: int


def import_stream(
    path: str | Path,
    name: str,
    *,
    url: str | None = None,
    epochs: Sequence[int] | None = None,
    payload: str | None = None,
    budget_bytes: int | None = None,
    retention: str | None = None,
    notify: Notify = to_stderr,
    progress: ExportProgress = lambda epoch, done, total: None,
) -> ImportResult:
    """Write the epochs of an export into a new stream, or into one of the same spec.

    A new stream has the export's partitions and info, and a budget that holds all of it.

    Args:
        path: the folder of the export.
        name: the stream's name.
        url: the server's address. None means the one in the environment.
        epochs: the numbers of the epochs. None means all of them.
        payload: where payloads lie, as for a writer.
        budget_bytes: the budget of the stream, also of an existing one. None means the default, or more if the epochs
            of a new stream need it.
        retention: the policy of the stream, also of an existing one.
        notify: called with each line for the user.
        progress: called after each block.

    Raises:
        BadExport: the files are not an export, or are incomplete or damaged.
        StreamConflict: the stream has other samples under these numbers.
        TooLarge: the budget cannot hold a block, or the epochs of a stream that no group reads.
        EpochAbandoned: the stream abandoned one of these epochs.

    Example:
        >>> import_stream("digits-export", "digits").new
        (0, 1)
    """
    folder = ExportFolder(path)
    contents = folder.contents
    notes = contents.epochs if epochs is None else tuple(contents.require(epoch) for epoch in sorted(set(epochs)))
    found = {note.epoch: list(complete_epoch(folder, note)) for note in notes}
    compression: dict[str, str] | None = None
    settings: dict[str, Any] = {"payload": payload, "budget_bytes": budget_bytes, "retention": retention}
    with connect(url or Settings.from_environment().url) as client:
        stream = find_stream(client, name)
        blocks, whole = _least_budgets(client, stream, contents.partitions, found, is_set=budget_bytes is not None)
        if stream is None:
            if budget_bytes is None:
                least = int(SPARE * max(blocks, whole))
                settings["budget_bytes"] = _chosen_budget(client, name, payload, contents.partitions, least)
            settings |= {"partitions": contents.partitions, "info": contents.info}
            # as the export's blocks, because the budget is that of their stored bytes
            compression = _compression(one for records in found.values() for one in records)
        budget = budget_bytes or (None if stream is None else stream.budget_bytes)
        if budget is not None:
            _require_fits(name, folder.path, budget, blocks, whole)
    segments = SegmentReader(folder)
    tuning = Tuning(notify=notify, compression=compression)
    with Writer(name, url=url, spec=contents.spec, tuning=tuning, **settings) as writer:
        try:
            runs = [_EpochImport(writer, segments, folder, note, found.pop(note.epoch), progress) for note in notes]
            is_written = {run.note.epoch: run.all_of_it() for run in runs}
        finally:
            segments.close()
    return ImportResult(
        name,
        tuple(epoch for epoch, written in is_written.items() if written),
        tuple(epoch for epoch, written in is_written.items() if not written),
        sum(note.samples for note in notes),
        sum(note.nbytes for note in notes),
    )


def _least_budgets(
    client: Client,
    stream: Stream | None,
    partitions: int,
    found: Mapping[int, Sequence[ScannedRecord]],
    *,
    is_set: bool,
) -> tuple[int, int]:
    """Return the least budget that each block fits, and the least one that holds what no group reads.

    Blocks that the stream has count if the budget ``is_set`` now. The second is 0 if nothing is new, or if a group
    reads the stream. Both are 0 if the stream compresses in a way of its own, because the sizes are not known then.
    """
    if stream is None:
        states, rosters = dict[int, str](), [Roster("") for _ in range(partitions)]
    elif stream.compression:
        return 0, 0
    else:
        states = retained_epochs(client, stream)
        rosters = [load_roster(client, partition) for partition in stream.partitions]
    new = [epoch for epoch in found if states.get(epoch) != PRODUCED]
    held = [
        {epoch: nbytes for epoch, nbytes in roster.epoch_bytes.items() if states.get(epoch) != ABANDONED}
        for roster in rosters
    ]
    for epoch in new:
        parts = [0] * len(rosters)
        for one in found[epoch]:
            parts[one.header.shard % len(rosters)] += _size(one)
        for part, nbytes in zip(held, parts, strict=True):
            part[epoch] = max(nbytes, part.get(epoch, 0))
    is_read = any(group.holds for roster in rosters for group in roster.groups.values())
    largest = max((_size(one) for epoch in (found if is_set else new) for one in found[epoch]), default=0)
    whole = 0 if is_read or not new else max(sum(part.values()) for part in held)
    return len(rosters) * 4 * largest, len(rosters) * whole


def _size(one: ScannedRecord) -> int:
    return sum(one.header.ref.sizes) if one.header.ref else 0


def _require_fits(name: str, path: Path, budget: int, blocks: int, whole: int) -> None:
    """Raise TooLarge for an import that would fail or wait for ever with this budget."""
    if (least := max(blocks, whole)) > budget:
        what = f"the blocks in {path}" if blocks > whole else f"all of {path}, because no group reads it"
        raise TooLarge(
            f"stream {name!r} needs a budget of {least:,} bytes for {what}; found {budget:,}: raise budget_bytes "
            f"(--budget) to {least}"
        )


def _chosen_budget(client: Client, name: str, payload: str | None, partitions: int, least: int) -> int | None:
    """Return a budget that holds the import, and fits server and file system. None is the default of a new stream."""
    default, capacity = default_budget(client, name, payload, partitions), default_capacity(payload)
    if capacity is not None and capacity < default:
        return max(least, capacity)
    return least if least > default else None


class _EpochImport:
    """The import of one epoch."""

    def __init__(
        self, writer: Writer, segments: SegmentReader, folder: ExportFolder, note: ExportedEpoch,
        found: list[ScannedRecord], progress: ExportProgress,
    ) -> None:  # fmt: skip
        self._writer, self._segments, self._folder, self.note = writer, segments, folder, note
        self._found, self._progress, self._done = found, progress, 0
        self._why: dict[int, dict[int, str]] = {}
        for shard, offset, why in note.bad:
            self._why.setdefault(shard, {})[offset] = why

    def all_of_it(self) -> bool:
        """Write the missing samples, and tell whether there were any."""
        manifest = self._opened()
        self._progress(self.note.epoch, 0, self.note.nbytes)
        shards = {shard: list(part) for shard, part in groupby(self._found, key=lambda one: one.header.shard)}
        is_written = False
        for shard, size in enumerate(self.note.sizes):
            if shard in manifest.done and manifest.done[shard] == size:
                self._compare(manifest, shard, shards.get(shard, []), size)
                continue
            is_written = True
            with WriterHooks(self._writer).open_shard(manifest, shard) as opened:
                self._compare(manifest, shard, shards.get(shard, []), opened.position)
                self._write(opened, shard, shards.get(shard, []), size)
        return is_written

    def _opened(self) -> Manifest:
        """Open the epoch, or the one of an earlier run. Raises StreamConflict where the stream has another epoch."""
        client, stream, note = self._writer.client, self._writer.stream, self.note
        there = find_manifest(client, stream, note.epoch)
        if there is not None and there.state == ABANDONED:
            raise EpochAbandoned(
                f"epoch {note.epoch} of {stream.name!r} was abandoned, and a number is never given out again: "
                "import into a new stream"
            )
        if there is not None:
            is_fresh = there.sizes is None and not begun_shards(client, stream, there)
            mine = (note.kind, note.seed, note.fingerprint, note.sizes)
            if (there.kind, there.seed, there.fingerprint, note.sizes if is_fresh else there.sizes) != mine:
                raise self._conflict("it has another plan")
            if there.state == PRODUCED:
                return there
        return open_epoch(
            client, stream, note.epoch, kind=note.kind, seed=note.seed, fingerprint=note.fingerprint, sizes=note.sizes
        )

    def _compare(self, manifest: Manifest, shard: int, found: list[ScannedRecord], upto: int) -> None:
        """Raise StreamConflict where the samples committed below an offset are not those of the files."""
        if not upto:
            return
        client, stream = self._writer.client, self._writer.stream
        records = index_records(client, stream.partition_of(shard), manifest.epoch, shard)
        there = {record.first: record for record in records if record.entry_id}
        for one in found:
            if one.header.end > upto:
                break
            if not self._is_same(there.get(one.header.first), one, shard):
                raise self._conflict(f"offsets {one.header.first}-{one.header.end - 1} of shard {shard} differ")
            self._done += _size(one)
        self._progress(self.note.epoch, min(self._done, self.note.nbytes), self.note.nbytes)

    def _is_same(self, record: IndexRecord | None, one: ScannedRecord, shard: int) -> bool:
        header = one.header
        if record is None or (record.end, record.count, record.holes) != (header.end, header.count, header.holes):
            return False
        where = self._writer.client, self._writer.stream, self.note.epoch, shard, record.entry_id
        there = entry_header(*where)
        if there is None or there.xxh3 is None or header.xxh3 is None or there.xxh3 == header.xxh3:
            return True
        if there.compression is None and header.compression is None:
            return False
        # a checksum is that of the stored bytes, which depend on the codec and its version
        segments = reader_of(self._writer.stream)
        fields = entry_fields(*where, segments)
        if fields is None:
            return True
        _, block = decode(fields, self._folder.contents.spec, takes_refs=True)
        return _digest(block) == _digest(self._block(one))

    def _conflict(self, what: str) -> StreamConflict:
        return StreamConflict(
            f"epoch {self.note.epoch} of {self._writer.stream.name!r} is not the one in {self._folder.path}: {what}; "
            "import into a new stream, or name other epochs with --epoch"
        )

    def _write(self, opened: ShardWriter, shard: int, found: list[ScannedRecord], size: int) -> None:
        """Write the samples of a shard that are not committed yet."""
        for one in found:
            self._write_holes(opened, shard, one.header.first)
            if one.header.end <= opened.position:
                continue
            if one.header.first != opened.position:
                raise ShardMismatch(f"shard {shard} was committed up to {opened.position}, in the middle of a block")
            why = self._why.get(shard, {})
            opened.write_block(self._block(one), {hole: why[hole] for hole in one.header.holes})
            self._done += _size(one)
            self._progress(self.note.epoch, min(self._done, self.note.nbytes), self.note.nbytes)
        self._write_holes(opened, shard, size)

    def _write_holes(self, opened: ShardWriter, shard: int, end: int) -> None:
        """Write blocks that hold only bad samples, up to an offset."""
        for block in _holes(opened.position, end):
            why = self._why.get(shard, {})
            opened.write_block(block, {hole: why[hole] for hole in block.holes})

    def _block(self, one: ScannedRecord) -> Block:
        ref = one.header.ref
        assert ref is not None
        try:
            payload = self._segments.read(ref)
            names = [name for name, _ in one.header.fields()]
            return decode(
                [(META_FIELD, one.meta), *zip(names, payload, strict=True)],
                self._folder.contents.spec,
                takes_refs=True,
            )[1]
        except BadEntry as error:
            raise BadExport(
                f"{self._folder.path / ref.file} at {ref.at}: {error}; copy the file again and import again: what is "
                f"there stands (or give the epoch up: `penstock epochs abandon {self._writer.stream.name} "
                f"{self.note.epoch}`)"
            ) from error


def _compression(records: Iterable[ScannedRecord]) -> dict[str, str] | None:
    """Return the codecs of the tensors in an export, or None if no block is compressed."""
    return {name: codec for one in records for name, codec in (one.header.compression or {}).items()} or None


def _digest(block: Block) -> str:
    """Return the checksum that the block has without compression."""
    return digest_of(value for _, value in encode(block, stream="any", epoch=0, shard=0, checksum=False)[1:])


def _holes(start: int, end: int) -> Iterator[Block]:
    while start < end:
        stop = min(end, start + MAX_HOLES)
        yield Block(start, 0, [], list(range(start, stop)))
        start = stop
