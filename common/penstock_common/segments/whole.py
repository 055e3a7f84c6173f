"""The check that the files of an exported epoch are complete. No payload is read."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_common.errors import BadExport, BadSegment
from penstock_common.segments.exports import ExportFolder
from penstock_common.segments.scanning import ScannedRecord, scan
from penstock_common.wire.export import ExportedEpoch, ExportedFile


def whole_epoch(folder: ExportFolder, note: ExportedEpoch) -> Iterator[ScannedRecord]:
    """Yield the epoch's blocks in canonical order.

    Raises:
        BadExport: A block is missing, duplicated, damaged, or belongs to another epoch.
    """
    bad = {(shard, offset) for shard, offset, _ in note.bad}
    walk = _Walk(folder, note, bad)
    for file in note.files:
        for found in _records(folder, file):
            walk.take(found)
            yield found
    walk.end()


def _records(folder: ExportFolder, file: ExportedFile) -> Iterator[ScannedRecord]:
    opened = folder.open_noted(file)
    count = 0
    try:
        for found in scan(opened):
            count += 1
            yield found
    except BadSegment as error:
        raise BadExport(f"{folder.path}: {error}; copy the file again, or export anew") from None
    finally:
        opened.close()
    if count != file.records:
        raise BadExport(
            f"{folder.path / file.name} has {count} records, {file.records} were exported: copy it again, or export "
            "anew"
        )


class _Walk:
    """The position at which the epoch's next block must begin."""

    def __init__(self, folder: ExportFolder, note: ExportedEpoch, bad: set[tuple[int, int]]) -> None:
        self._folder, self._note, self._bad = folder, note, bad
        self._shard = self._offset = self._samples = self._holes = 0

    def take(self, found: ScannedRecord) -> None:
        header, sizes = found.header, self._note.sizes
        if header.epoch != self._note.epoch or header.shard >= len(sizes) or header.end > sizes[header.shard]:
            raise self._error(f"a block of epoch {header.epoch}, shard {header.shard}, offsets up to {header.end - 1}")
        while self._shard < header.shard:
            self._pass(sizes[self._shard])
            self._shard, self._offset = self._shard + 1, 0
        if header.shard < self._shard or header.first < self._offset:
            raise self._error(f"offset {header.first} of shard {header.shard} out of its order, or twice")
        self._pass(header.first)
        if any((header.shard, hole) not in self._bad for hole in header.holes):
            raise self._error(f"a hole in shard {header.shard} that no bad sample explains")
        self._holes += len(header.holes)
        self._samples += header.count
        self._offset = header.end

    def _pass(self, end: int) -> None:
        """Raise BadExport unless all offsets up to ``end`` are bad samples."""
        for offset in range(self._offset, end):
            if (self._shard, offset) not in self._bad:
                raise self._error(f"offset {offset} of shard {self._shard} is missing")
            self._holes += 1
        self._offset = end

    def end(self) -> None:
        for shard in range(self._shard, len(self._note.sizes)):
            self._shard, self._offset = shard, self._offset if shard == self._shard else 0
            self._pass(self._note.sizes[shard])
        if self._holes != len(self._bad) or self._samples != self._note.samples:
            raise self._error(
                f"{self._samples} samples and {self._holes} bad ones, {self._note.samples} and {len(self._bad)} noted"
            )

    def _error(self, what: str) -> BadExport:
        return BadExport(
            f"epoch {self._note.epoch} of the export {self._folder.path} is not whole: {what}; export it anew"
        )
