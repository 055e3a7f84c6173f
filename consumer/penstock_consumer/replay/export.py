"""Exporting: copy a stream's epochs to files, bit-exact, with the holes and their reasons.

A replay's lease holds an epoch while it is copied. Each entry is verified as it is read. An epoch counts once all of it
is on the disk and ``export.json`` names it. That file names every epoch, so many small ones are named together. An
unfinished file is named ``.part``. A file that ``export.json`` does not name was left by an interrupted run, and the
next run removes it. An epoch with a missing or a cut file is copied again. The way back is the producer's
`write/importer.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

from penstock_common.errors import BadEntry, BadExport, EpochIncomplete, UnsupportedVersion
from penstock_common.segments.exports import (
    CONTENTS,
    ExportContents,
    ExportedEpoch,
    ExportedFile,
    ExportProgress,
    dump_contents,
    load_contents,
)
from penstock_common.segments.folder import MODE, new_token, sync
from penstock_common.segments.reader import SegmentReader
from penstock_common.segments.writer import write_all
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord
from penstock_common.stream.manifest import PRODUCED, retained_epochs
from penstock_common.stream.mending.bad import list_quarantined
from penstock_common.stream.payloads import entry_fields, reader_of
from penstock_common.stream.streams import Stream, load_stream
from penstock_common.tuning import LEASE_S
from penstock_common.wire.codec import Fields, decode
from penstock_common.wire.header import NAME, SegmentRef, ref_bytes, with_ref, without_ref
from penstock_common.wire.segment import SegmentInfo, pack_info, place_record, record_parts
from penstock_consumer.replay.retained import RetainedEpoch

PART = ".part"
EXPORT_BYTES = 1 << 30
"""Bytes after which a file of an export takes no further record."""
NAMED_EVERY_S = 1.0
"""The seconds between two writes of ``export.json``. After a kill the epochs of that time are copied again."""
_OURS = re.compile(rf"({NAME.pattern[:-2]}({re.escape(PART)})?|{re.escape(CONTENTS + PART)})\Z")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export."""

    path: Path
    contents: ExportContents
    new: tuple[int, ...]
    """The epochs that were copied, for the first time or again."""
    kept: tuple[int, ...]
    """The epochs that an earlier export to the same folder had copied, and whose files are there in full."""


def export_stream(
    client: Client,
    name: str,
    path: str | Path,
    *,
    epochs: Sequence[int] | None = None,
    file_bytes: int = EXPORT_BYTES,
    progress: ExportProgress = lambda epoch, done, total: None,
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
        kept = [epoch for epoch in wanted if writer.has_whole(epoch)]
        new = [epoch for epoch in wanted if epoch not in kept]
        for epoch in new:
            writer.finish(_copied(client, stream, epoch, writer, progress))
        return ExportResult(writer.path, writer.contents, tuple(new), tuple(kept))


def _produced(client: Client, stream: Stream) -> list[int]:
    states = retained_epochs(client, stream)
    found = [epoch for epoch, state in states.items() if state == PRODUCED]
    if not found:
        there = ", ".join(f"{epoch} ({state})" for epoch, state in states.items()) or "none"
        raise EpochIncomplete(f"stream {stream.name!r} has no produced epoch to export; epochs there: {there}")
    return found


def _copied(
    client: Client, stream: Stream, epoch: int, writer: ExportWriter, progress: ExportProgress
) -> ExportedEpoch:
    """Copy the entries of an epoch, and return its note, still without files."""
    held = RetainedEpoch(client, stream, epoch, LEASE_S)
    try:
        done = 0
        writer.begin(epoch)
        progress(epoch, 0, held.nbytes)
        for fields, record in _entries(client, held):
            held.lease.raise_lost()
            writer.append(fields)
            done += record.nbytes
            progress(epoch, done, held.nbytes)
        holes = [(shard, offset) for shard, record in held.records() for offset in record.holes]
        why = {(bad.shard, bad.offset): bad.why for bad in list_quarantined(client, stream, epoch)}
        manifest = held.manifest
        return ExportedEpoch(
            epoch, manifest.kind, manifest.seed, manifest.fingerprint,
            tuple(manifest.shard_size(shard) for shard in manifest.shards()), held.samples, held.nbytes, (),
            tuple((shard, offset, why.get((shard, offset), "")) for shard, offset in holes),
        )  # fmt: skip
    finally:
        held.lease.let_go()


def _entries(client: Client, held: RetainedEpoch) -> Iterator[tuple[Fields, IndexRecord]]:
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
    client: Client, held: RetainedEpoch, shard: int, record: IndexRecord, segments: SegmentReader | None
) -> Fields:
    stream, epoch = held.stream, held.epoch
    try:
        fields = entry_fields(client, stream, epoch, shard, record.entry_id, segments)
        if fields is None:
            raise held.truncated(record)
        header, _ = decode(fields, stream.require_spec(), takes_refs=segments is not None)
    except UnsupportedVersion:
        raise  # nothing is damaged, and its text says what to do
    except BadEntry as error:
        raise type(error)(
            f"entry {record.entry_id.decode()} of stream {stream.name!r} (epoch {epoch}, shard {shard}, offsets "
            f"{record.first}-{record.end - 1}) cannot be exported: {error}; `penstock audit {stream.name} --deep "
            "--repair SOURCE...` makes damaged samples again, --epoch N exports other epochs"
        ) from error
    said = (header.stream, header.epoch, header.shard, header.first, header.end, header.holes)
    if said != (stream.id, epoch, shard, record.first, record.end, record.holes):
        raise BadEntry(
            f"the index says that entry {record.entry_id.decode()} has offsets {record.first}-{record.end - 1} of "
            f"shard {shard}, it says {header.first}-{header.end - 1} of {header.shard}: `penstock audit {stream.name}`"
        )
    meta = bytes(fields[0][1])
    return [(fields[0][0], meta if header.ref is None else without_ref(meta)), *fields[1:]]


# --- files -----------------------------------------------------------------------------------------------------------


class ExportWriter:
    """Adds epochs to an export, one after another. `exporting` makes it."""

    def __init__(self, path: Path, contents: ExportContents, file_bytes: int) -> None:
        self.path, self.contents, self._file_bytes = path, contents, file_bytes
        self._epoch = 0
        self._fd: int | None = None
        self._name = ""
        self._at = self._records = 0
        self._files: list[ExportedFile] = []
        self._named_s = -NAMED_EVERY_S
        """When ``export.json`` was written."""
        self._is_named = True
        """Whether it has all of `contents`."""
        self._old: list[ExportedFile] = []
        """The files of earlier copies. They go once ``export.json`` names the new ones."""

    def has_whole(self, epoch: int) -> bool:
        """Return whether the epoch is in the contents, and its files are there with their sizes."""
        note = self.contents.find(epoch)
        return note is not None and all(_is_there(self.path / file.name, file.nbytes) for file in note.files)

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

    def finish(self, note: ExportedEpoch) -> None:
        """Give the epoch's files their names, and then put the epoch into the contents.

        Only ``export.json`` counts. It is written at once after `NAMED_EVERY_S`, else with a later epoch or by `close`.
        """
        self._end_file()
        for file in self._files:
            (self.path / (file.name + PART)).rename(self.path / file.name)
        _sync_folder(self.path)
        before = self.contents.find(note.epoch)
        others = [one for one in self.contents.epochs if one.epoch != note.epoch]
        epochs = (*others, replace(note, files=tuple(self._files)))
        self.contents = replace(self.contents, epochs=tuple(sorted(epochs, key=lambda one: one.epoch)))
        self._old.extend(() if before is None else before.files)
        self._is_named = False
        if time.monotonic() - self._named_s >= NAMED_EVERY_S:
            self._name_epochs()

    def _name_epochs(self) -> None:
        _write_contents(self.path, self.contents)
        self._named_s, self._is_named = time.monotonic(), True
        while self._old:
            (self.path / self._old.pop().name).unlink(missing_ok=True)

    def close(self) -> None:
        """Name all finished epochs, and close the file. An unfinished one keeps its name, ``.part``."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if not self._is_named:
            self._name_epochs()


@contextmanager
def exporting(path: str | Path, contents: ExportContents, *, file_bytes: int = EXPORT_BYTES) -> Iterator[ExportWriter]:
    """Open a folder for writing epochs of ``contents``: a new one, or one with an earlier export of this stream.

    The files that an interrupted run left are removed. A new export without a finished epoch leaves nothing.

    Raises:
        BadExport: The folder holds something else, another export is being written there, or the disk is full.
    """
    path = Path(path).expanduser().absolute()
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = "it is a file, expected a folder: name a new one" if path.is_file() else error.strerror
        raise BadExport(f"{path} cannot be exported to: {what}") from None
    try:
        _lock_alone(lock, path)
        is_new = not (path / CONTENTS).exists()
        writer = ExportWriter(path, _taken_over(path, contents), file_bytes)
        try:
            yield writer
        finally:
            writer.close()
            if is_new and not writer.contents.epochs:
                _remove_unfinished(path, made)
    except OSError as error:
        raise BadExport(f"{path} cannot be exported to: {error.strerror or error}; what is finished stands") from error
    finally:
        os.close(lock)


def _is_there(file: Path, nbytes: int) -> bool:
    """Return whether a file of this size is there. A link or a pipe is none."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return False
    return S_ISREG(found.st_mode) and found.st_size == nbytes


def _lock_alone(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadExport(f"another export to {path} is running") from None


def _remove_unfinished(path: Path, made: Sequence[Path]) -> None:
    """Remove the files of an export without an epoch, and the folders that were made for it, innermost first."""
    with suppress(OSError):  # the error that ended the export says more
        for found in list(path.iterdir()):
            if found.name == CONTENTS or _OURS.match(found.name):
                found.unlink()
        for folder in made:
            folder.rmdir()


def _taken_over(path: Path, contents: ExportContents) -> ExportContents:
    """Clean up, and return the contents that are there afterwards."""
    before = load_contents(path)
    if before is None:
        foreign = sorted(found.name for found in path.iterdir() if found.name != CONTENTS + PART)
        if foreign:
            is_export = all(_OURS.match(name) for name in foreign)
            fix = f"copy its {CONTENTS} again, or delete it and export again" if is_export else "name a new folder"
            raise BadExport(f"{path} is not empty and no export: it has {foreign[0]!r}; {fix}")
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
    with open(part, "wb", opener=lambda name, flags: os.open(name, flags, MODE)) as file:
        file.write(dump_contents(contents))
        file.flush()
        os.fsync(file.fileno())
    part.rename(path / CONTENTS)
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        sync(path)
