"""Export folders: ``export.json`` and segments. They are opened, checked for completeness, and written here.

An unfinished file is named ``.part``. A file that ``export.json`` does not name was left by an interrupted run, and the
next run removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from penstock_common.errors import BadExport, BadSegment, SegmentGone
from penstock_common.segments.folder import MODE, OpenSegment, new_token, open_segment
from penstock_common.segments.reader import ScannedRecord, scan
from penstock_common.segments.writer import write_all
from penstock_common.wire.codec import Fields
from penstock_common.wire.export import (
    CONTENTS,
    MAX_CONTENTS_BYTES,
    ExportContents,
    ExportedEpoch,
    ExportedFile,
    dump_contents,
    parse_contents,
)
from penstock_common.wire.header import NAME, SegmentRef, ref_bytes, with_ref
from penstock_common.wire.segment import SegmentInfo, pack_info, parse_info, place_record, record_parts

PART = ".part"
EXPORT_BYTES = 1 << 30
"""Bytes after which a file of an export takes no further record."""
_OURS = re.compile(rf"({NAME.pattern[:-2]}({re.escape(PART)})?|{re.escape(CONTENTS + PART)})\Z")


class ExportFolder:
    """An existing export."""

    def __init__(self, path: str | Path) -> None:
        """Open an export. Raises BadExport if there is none, or if it has no finished epoch."""
        self.path = Path(path).expanduser().absolute()
        found = load_contents(self.path)
        if not self.path.exists():
            raise BadExport(
                f"there is no folder {self.path}: name the one that `penstock export STREAM DIR` made "
                "(`penstock import DIR STREAM`)"
            )
        if found is None:
            raise BadExport(f"{self.path} is no export: it has no {CONTENTS}; `penstock export STREAM DIR` makes one")
        if not found.epochs:
            raise BadExport(f"{self.path} has no finished epoch: run the `penstock export` that made it again")
        self.contents = found

    def require(self) -> None:
        """Raise BadExport if the folder is gone."""
        if not (self.path / CONTENTS).exists():
            raise BadExport(f"{self.path} is no export any more: its {CONTENTS} is gone")

    def open(self, name: str) -> OpenSegment:
        """Open one of its files. Raises SegmentGone."""
        return open_segment(self.path, name)

    def open_noted(self, note: ExportedFile) -> OpenSegment:
        """Open one of its files and compare it with the contents. Raises BadExport."""
        try:
            opened = self.open(note.name)
        except SegmentGone as error:
            raise BadExport(f"{self.path}: {error}") from None
        info = parse_info(opened.head)
        if opened.nbytes != note.nbytes or (info.stream, info.spec) != (self.contents.stream, self.contents.spec):
            size = opened.nbytes
            opened.close()
            raise BadExport(
                f"{self.path / note.name} has {size} bytes of stream {info.stream}, expected are {note.nbytes} of "
                f"{self.contents.stream}: it was cut short, or is of another export; copy it again"
            )
        return opened


def load_contents(path: Path) -> ExportContents | None:
    """Return the contents of an export, finished or not, or None if there is none. Raises BadExport if damaged."""
    try:
        if (path / CONTENTS).stat().st_size > MAX_CONTENTS_BYTES:
            raise BadExport(f"{path / CONTENTS} is larger than {MAX_CONTENTS_BYTES} bytes")
        data = (path / CONTENTS).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadExport(f"{path / CONTENTS} cannot be read: {error.strerror}") from None
    return parse_contents(data)


def complete_epoch(folder: ExportFolder, note: ExportedEpoch) -> Iterator[ScannedRecord]:
    """Yield the epoch's blocks in canonical order.

    Raises:
        BadExport: A block is missing, duplicated, damaged, or belongs to another epoch.
    """
    bad = {(shard, offset) for shard, offset, _ in note.bad}
    walk = _NextBlock(folder, note, bad)
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
        raise BadExport(f"{folder.path}: {error}; copy the file again, or export again") from None
    finally:
        opened.close()
    if count != file.records:
        raise BadExport(
            f"{folder.path / file.name} has {count} records, {file.records} were exported: copy it again, or export "
            "again"
        )


class _NextBlock:
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
            f"epoch {self._note.epoch} of the export {self._folder.path} is not complete: {what}; export it again"
        )


class ExportWriter:
    """Adds epochs to an export, one after another. `exporting` makes it."""

    def __init__(self, path: Path, contents: ExportContents, file_bytes: int) -> None:
        self.path, self.contents, self._file_bytes = path, contents, file_bytes
        self._epoch = 0
        self._fd: int | None = None
        self._name = ""
        self._at = self._records = 0
        self._files: list[ExportedFile] = []

    def begin(self, epoch: int) -> None:
        """Begin an epoch: all later entries belong to it."""
        self._epoch, self._files = epoch, []

    def append(self, fields: Fields) -> None:
        """Append one entry in its inline form, with a header without a ``ref``."""
        meta, payload = bytes(fields[0][1]), [memoryview(value) for _, value in fields[1:]]
        sizes = [value.nbytes for value in payload]
        if self._fd is None or self._at >= self._file_bytes:
            self._next_file()
        assert self._fd is not None
        start = self._at
        at, end = place_record(start, len(meta) + ref_bytes(self._name, len(sizes)), sizes)
        ref = SegmentRef(self._name, at, tuple(sizes))
        write_all(self._fd, record_parts(self._name, start, ref, with_ref(meta, ref), payload), start)
        self._at, self._records = end, self._records + 1

    def _next_file(self) -> None:
        self._end_file()
        contents = self.contents
        info = SegmentInfo(contents.stream, contents.name, self._epoch, 0, new_token(), contents.spec)
        self._name, head = info.file, pack_info(info)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(self.path / (self._name + PART), flags, MODE)
        write_all(self._fd, [head], 0)
        self._at, self._records = len(head), 0

    def _end_file(self) -> None:
        if self._fd is not None:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = None
            self._files.append(ExportedFile(self._name, self._at, self._records))

    def files(self) -> tuple[ExportedFile, ...]:
        """End the epoch's files and give them their names. They count once `finish` has named them."""
        self._end_file()
        for note in self._files:
            (self.path / (note.name + PART)).rename(self.path / note.name)
        _sync_folder(self.path)
        return tuple(self._files)

    def finish(self, contents: ExportContents) -> None:
        """Write new contents."""
        _write_contents(self.path, contents)
        self.contents = contents

    def close(self) -> None:
        """Close the file. An unfinished one keeps its name, ``.part``."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextmanager
def exporting(path: str | Path, contents: ExportContents, *, file_bytes: int = EXPORT_BYTES) -> Iterator[ExportWriter]:
    """Open a folder for writing epochs of ``contents``: a new one, or one with an earlier export of this stream.

    The files that an interrupted run left are removed.

    Raises:
        BadExport: The folder holds something else, another export is being written there, or the disk is full.
    """
    path = Path(path).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = "it is a file, expected a folder: name a new one" if path.is_file() else error.strerror
        raise BadExport(f"{path} cannot be exported to: {what}") from None
    try:
        _lock_alone(lock, path)
        writer = ExportWriter(path, _taken_over(path, contents), file_bytes)
        try:
            yield writer
        finally:
            writer.close()
    except OSError as error:
        raise BadExport(f"{path} cannot be exported to: {error.strerror or error}; what is finished stands") from error
    finally:
        os.close(lock)


def _lock_alone(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadExport(f"another export to {path} is running") from None


def _taken_over(path: Path, contents: ExportContents) -> ExportContents:
    """Clean up, and return the contents that are there afterwards."""
    before = load_contents(path)
    if before is None:
        foreign = sorted(found.name for found in path.iterdir() if found.name != CONTENTS + PART)
        if foreign:
            raise BadExport(f"{path} is not empty and no export: it has {foreign[0]!r}; name a new folder")
        _write_contents(path, contents)
        return contents
    if (before.stream, before.spec) != (contents.stream, contents.spec):
        raise BadExport(
            f"{path} has an export of {before.name!r} (id {before.stream}), this is {contents.name!r} "
            f"(id {contents.stream}): name a new folder"
        )
    named = {note.name for epoch in before.epochs for note in epoch.files}
    for found in path.iterdir():
        if _OURS.match(found.name) and found.name not in named:
            found.unlink()
    return replace(before, info=contents.info)


def _write_contents(path: Path, contents: ExportContents) -> None:
    part = path / (CONTENTS + PART)
    with part.open("wb") as file:
        file.write(dump_contents(contents))
        file.flush()
        os.fsync(file.fileno())
    part.rename(path / CONTENTS)
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
