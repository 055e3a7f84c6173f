"""Exports: a folder, its ``export.json`` as bytes and as values, and the blocks of an epoch, found complete.

An export may come from anybody, so every value is bounded before use. docs/segment-format.md defines the files.
`penstock_consumer.replay.export` gives the values, and writes the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock_common.errors import BadExport, BadSegment, BadSpec, SegmentGone
from penstock_common.printable import shortened
from penstock_common.segments.folder import OpenSegment, open_segment
from penstock_common.segments.reader import ScannedRecord, scan
from penstock_common.wire.header import MAX_SEGMENT_BYTES, NAME, STREAM_ID
from penstock_common.wire.limits import MAX_NUMBER, MAX_PARTITIONS, MAX_SHARD_SAMPLES
from penstock_common.wire.segment import parse_info
from penstock_common.wire.spec import Spec

T = TypeVar("T")

CONTENTS = "export.json"
KIND, VERSION = "penstock export", 1
MAX_CONTENTS_BYTES = 256 << 20
MAX_SHARDS = 1 << 22
MAX_REASON = 500
"""Characters that are kept of a bad sample's reason, as in a stream."""
ExportProgress = Callable[[int, int, int], None]
"""A function of an epoch, its payload bytes copied so far, and all of its payload bytes."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A segment file of an export."""

    name: str
    nbytes: int
    """The bytes of the whole file: a shorter file was truncated."""
    records: int


@dataclass(frozen=True, slots=True)
class ExportedEpoch:
    """An epoch of an export."""

    epoch: int
    kind: str
    seed: int
    fingerprint: str
    sizes: tuple[int, ...]
    """The samples of each shard, bad ones included."""
    samples: int
    """The number of good samples."""
    nbytes: int
    """The payload bytes."""
    files: tuple[ExportedFile, ...]
    """The files in canonical order; so are the records in them."""
    bad: tuple[tuple[int, int, str], ...]
    """(shard, offset, reason) of each bad sample."""


@dataclass(frozen=True, slots=True)
class ExportContents:
    """The description of an export."""

    name: str
    """The stream's name, for people."""
    stream: str
    """The stream's id, which every record names."""
    spec: Spec
    info: dict[str, Any]
    partitions: int
    epochs: tuple[ExportedEpoch, ...] = ()

    def find(self, epoch: int) -> ExportedEpoch | None:
        """Return the epoch, or None if it was not exported."""
        return next((note for note in self.epochs if note.epoch == epoch), None)

    def require(self, epoch: int | None) -> ExportedEpoch:
        """Return the epoch, or the only one for None. Raises BadExport, which names the epochs of the export."""
        found = self.find(epoch) if epoch is not None else self.epochs[0] if len(self.epochs) == 1 else None
        if found is None:
            there = ", ".join(str(note.epoch) for note in self.epochs) or "none"
            asked = "say which with epoch=" if epoch is None else f"there is no epoch {epoch}"
            raise BadExport(f"the export of {self.name!r} has the epochs {there}: {asked}")
        return found


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

    def open_noted(self, note: ExportedFile) -> OpenSegment:
        """Open one of its files and compare it with the contents. Raises BadExport."""
        try:
            opened = open_segment(self.path, note.name)
        except SegmentGone as error:
            raise BadExport(f"{self.path}: {error}; {advice_on(self.path / note.name)}") from None
        info = parse_info(opened.head)
        if opened.nbytes != note.nbytes or (info.stream, info.spec) != (self.contents.stream, self.contents.spec):
            size = opened.nbytes
            opened.close()
            raise BadExport(
                f"{self.path / note.name} has {size} bytes of stream {info.stream}, expected are {note.nbytes} of "
                f"{self.contents.stream}: it was cut short, or is of another export; "
                f"{advice_on(self.path / note.name)}"
            )
        return opened


def advice_on(file: Path) -> str:
    """Return what to do about a file that is missing or damaged. An export copies an epoch again that lacks a file."""
    return f"copy the file again, or {'delete it and ' if os.path.lexists(file) else ''}export again"


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
    try:
        return parse_contents(data)
    except BadExport as error:
        raise BadExport(f"{path}{os.sep}{error}") from None


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
        raise BadExport(f"{folder.path}: {error}; {advice_on(folder.path / file.name)}") from None
    finally:
        opened.close()
    if count != file.records:
        raise BadExport(
            f"{folder.path / file.name} has {count} records, {file.records} were exported; "
            f"{advice_on(folder.path / file.name)}"
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
            f"epoch {self._note.epoch} of the export {self._folder.path} is not complete: {what}; delete "
            f"its files {self._note.epoch}-*.seg, and export it again"
        )


# --- export.json -----------------------------------------------------------------------------------------------------


_ANEW = "copy that file again, or delete the folder and export again"


def dump_contents(contents: ExportContents) -> bytes:
    """Return the bytes of ``export.json``."""
    epochs = [
        {
            "epoch": one.epoch, "kind": one.kind, "seed": one.seed, "fingerprint": one.fingerprint,
            "sizes": list(one.sizes), "samples": one.samples, "bytes": one.nbytes,
            "files": [[note.name, note.nbytes, note.records] for note in one.files], "bad": [list(b) for b in one.bad],
        }
        for one in contents.epochs
    ]  # fmt: skip
    value = {
        "format": KIND, "v": VERSION, "name": contents.name, "stream": contents.stream,
        "spec": contents.spec.as_json(), "info": contents.info, "partitions": contents.partitions, "epochs": epochs,
    }  # fmt: skip
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def parse_contents(data: bytes) -> ExportContents:
    """Parse and bound the bytes of ``export.json``. Raises BadExport, which says what is wrong."""
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise BadExport(f"{CONTENTS} is not JSON: {str(error)[:80]}; {_ANEW}") from None
    if type(value) is not dict or value.get("format") != KIND:
        raise BadExport(f"{CONTENTS} is not that of an export; {_ANEW}")
    if value.get("v") != VERSION:
        raise BadExport(f"{CONTENTS} has version {value.get('v')!r:.40}, this process knows {VERSION}: update penstock")
    try:
        return _contents(value)
    except (KeyError, TypeError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise BadExport(f"{CONTENTS}: {what}; {_ANEW}") from None


def _contents(value: dict[str, Any]) -> ExportContents:
    stream = _typed(value, "stream", str)
    if not STREAM_ID.match(stream):
        raise ValueError("stream is no id")
    try:
        spec = Spec.from_json(value["spec"])
    except BadSpec as error:
        raise ValueError(f"spec: {error}") from None
    if type(value["info"]) is not dict:
        raise ValueError("info is not an object")
    epochs = tuple(_epoch(one) for one in _typed(value, "epochs", list))
    numbers = [one.epoch for one in epochs]
    if sorted(set(numbers)) != numbers:
        raise ValueError("epochs do not rise")
    partitions = _bounded("partitions", value["partitions"], MAX_PARTITIONS)
    return ExportContents(_typed(value, "name", str), stream, spec, value["info"], max(1, partitions), epochs)


def _epoch(value: dict[str, Any]) -> ExportedEpoch:
    epoch = _bounded("epoch", value["epoch"], MAX_NUMBER)
    sizes = tuple(_bounded("sizes", size, MAX_SHARD_SAMPLES) for size in _typed(value, "sizes", list))
    if len(sizes) > MAX_SHARDS:
        raise ValueError(f"epoch {epoch} has {len(sizes)} shards")
    files = tuple(_file(epoch, one) for one in _typed(value, "files", list))
    if len({note.name for note in files}) != len(files):
        raise ValueError(f"epoch {epoch} names a file more than once")
    bad = tuple(_bad(sizes, one) for one in _typed(value, "bad", list))
    seed = value["seed"]
    if type(seed) is not int:
        raise ValueError(f"seed is {seed!r:.40}")
    return ExportedEpoch(
        epoch, _typed(value, "kind", str), seed, _typed(value, "fingerprint", str), sizes,
        _bounded("samples", value["samples"], sum(sizes)), _bounded("bytes", value["bytes"], MAX_NUMBER), files, bad,
    )  # fmt: skip


def _file(epoch: int, value: Any) -> ExportedFile:
    name, nbytes, records = value
    if type(name) is not str or not NAME.match(name) or not name.startswith(f"{epoch}-"):
        raise ValueError(f"{ascii(name)[:80]} is no name of a segment of epoch {epoch}")
    return ExportedFile(name, _bounded("bytes", nbytes, MAX_SEGMENT_BYTES), _bounded("records", records, MAX_NUMBER))


def _bad(sizes: tuple[int, ...], value: Any) -> tuple[int, int, str]:
    shard, offset, why = value
    _bounded("bad shard", shard, len(sizes) - 1)
    _bounded("bad offset", offset, sizes[shard] - 1)
    if type(why) is not str:
        raise ValueError("a reason is no text")
    return shard, offset, shortened(why, MAX_REASON)


def _typed(value: dict[str, Any], key: str, kind: type[T]) -> T:
    found = value[key]
    if type(found) is not kind:
        raise ValueError(f"{key} is {ascii(found)[:40]}")
    return found


def _bounded(what: str, value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {ascii(value)[:40]}, expected 0 to {most}")
    return value
