"""The reader of segments, which copies payloads straight into the arrays of batches.

It copies from a kept map if files are in memory, else by ``preadv``: one copy in both cases. A file is locked while it
is read. Under the lock the reader checks that it is still the same file, and long enough.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, BadSegment, PenstockError, SegmentGone
from penstock_common.segments.folder import MODE, NOTES, VIEWS_A_CALL, OpenSegment, open_segment, unreadable
from penstock_common.segments.mapping import SegmentMaps, lies_in_memory
from penstock_common.wire.header import FILE_PAGE, Header, SegmentRef, parse_header
from penstock_common.wire.limits import MAX_HEADER_BYTES
from penstock_common.wire.segment import RECORD_BYTES, parse_info, parse_record, rest_of

ASK_BYTES = 1 << 20
"""The bytes of one request. Of a larger request, the kernel fetches what the disk reads at once and drops the rest."""
_FLAGS = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class Readahead:
    """Asks the kernel to fetch parts of files, in the order of the calls. For use by one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-ahead")  # it runs from the first request on

    def fetch(self, path: Path, start: int, end: int) -> None:
        """Ask for bytes ``[start, end)`` of a file and for its head.

        A failure shows when the bytes are read.
        """
        if start >= end:
            return
        with suppress(RuntimeError):  # no thread can be started, or the process ends
            self._thread.submit(_fetch, path, start, end)

    def close(self) -> None:
        """End the thread and drop the requests it has not made yet. A later request starts another one."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "penstock-ahead")


def _fetch(path: Path, start: int, end: int) -> None:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            for at, until in ((0, FILE_PAGE), *((at, min(at + ASK_BYTES, end)) for at in range(start, end, ASK_BYTES))):
                os.posix_fadvise(fd, at, until - at, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


OPEN_FILES = 32
"""Files kept open. An open file without a lock may be used again by writers."""
HELD_FILES = 2
"""Files kept locked for views, even if no view is alive."""
AHEAD_BYTES = 32 << 20
"""Bytes of a file that are asked for in advance: a disk is slow with small requests."""
STEP_BYTES = 8 << 20
"""The smallest such request, except at the end of a file, because each request wakes the thread."""


class PayloadFolder(Protocol):
    """A folder of segments: a stream's, or an export's."""

    path: Path

    def require(self) -> None:
        """Raise SegmentsUnseen unless this process sees it."""


class SegmentReader:
    """Reads the payloads of entries. For use by one thread."""

    def __init__(
        self, folder: PayloadFolder, *, gives_views: bool = False, maps: SegmentMaps | None = None,
        checked: CheckedBlocks | None = None,
    ) -> None:  # fmt: skip
        self._folder, self.gives_views, self._maps = folder, gives_views, maps or SegmentMaps()
        self.checked = checked
        """The notes on blocks whose checksum needs no comparison here; None where none are kept."""
        self._held: OrderedDict[str, tuple[OpenSegment, NDArray[np.uint8]]] = OrderedDict()
        """Name to a locked file and its array, which owns the descriptor."""
        self._open: OrderedDict[str, _Source] = OrderedDict()
        weakref.finalize(self, _close_all, self._open)
        self._ahead, self._is_announced = Readahead(), False
        """``_is_announced``: whether callers announce what they read next, so that the reader does not guess."""

    def require(self) -> None:
        """Raise SegmentsUnseen unless this process sees the folder."""
        self._folder.require()

    @cached_property
    def lies_in_memory(self) -> bool:
        """Return whether the folder is on a memory file system, which needs no readahead."""
        return lies_in_memory(self._folder.path)

    def read_into(self, ref: SegmentRef, views: Sequence[Sequence[memoryview]]) -> None:
        """Copy each payload field, in wire order, into its views. Raises SegmentGone, with undefined views."""
        source = self._source(ref.file)
        segment = source.segment
        try:
            fcntl.flock(segment.fd, fcntl.LOCK_SH)
            try:
                _require_same(segment)
                if source.mapped is not None:
                    _require_length(segment, ref)
                else:
                    self._ask(source, ref)
                for (at, size), pieces in zip(ref.spans(), views, strict=True):
                    if source.mapped is not None:
                        _copy_all(source.mapped[at : at + size], pieces)
                    else:
                        _read_all(segment, pieces, at, size)
            finally:
                fcntl.flock(segment.fd, fcntl.LOCK_UN)
        except (SegmentGone, OSError) as error:
            self._forget(ref.file)
            if isinstance(error, SegmentGone):
                raise
            raise SegmentGone(f"the payload is in {ref.file}, which cannot be read: {error.strerror}") from None

    def expect(self, ref: SegmentRef) -> None:
        """Ask the kernel for a payload that will be read soon, out of order. A failure shows when it is read."""
        if not self.lies_in_memory:
            self._is_announced = True
            self._ahead.fetch(self._folder.path / ref.file, ref.at, ref.end)

    def _ask(self, source: _Source, ref: SegmentRef) -> None:
        """Ask the kernel for the bytes after this payload, if a file is read from start to end."""
        if not source.reads_on(ref) or self._is_announced:
            return
        if (wanted := source.take_ahead(ref.end)) is not None:
            self._ahead.fetch(self._folder.path / source.segment.name, *wanted)

    def look(self, ref: SegmentRef) -> None:
        """Raise SegmentGone if the file cannot hold the whole payload. The payload is not read."""
        segment = self._source(ref.file).segment
        try:
            _require_same(segment)
            _require_length(segment, ref)
            if not os.fstat(segment.fd).st_nlink:
                raise SegmentGone(f"the payload is in {ref.file}, which was removed")
        except SegmentGone:
            self._forget(ref.file)
            raise

    def views(self, ref: SegmentRef) -> list[NDArray[np.uint8]]:
        """Return the payload fields as read-only views of the file, 64-byte aligned. Raises SegmentGone.

        The file is not used again as long as one of these arrays, or a part of one, is alive.
        """
        if ref.file not in self._held:
            opened = open_segment(self._folder.path, ref.file)
            self._held[ref.file] = opened, _held_whole(opened, self._maps)
            if len(self._held) > HELD_FILES:
                self._held.popitem(last=False)
        self._held.move_to_end(ref.file)
        opened, whole = self._held[ref.file]
        if ref.end > whole.nbytes:
            raise SegmentGone(f"the payload is in {ref.file}, which ends before it: {ref.end} bytes were expected")
        _require_length(opened, ref)  # it may have been truncated since, and reading beyond its end is a SIGBUS
        return [whole[at : at + size] for at, size in ref.spans()]

    def read(self, ref: SegmentRef) -> list[bytes]:
        """Return the payload fields as bytes. Raises SegmentGone."""
        buffers = [bytearray(size) for size in ref.sizes]
        self.read_into(ref, [[memoryview(buffer)] for buffer in buffers])
        return [bytes(buffer) for buffer in buffers]

    def _source(self, name: str) -> _Source:
        source = self._open.get(name)
        if source is None:
            opened = open_segment(self._folder.path, name)
            source = self._open[name] = _Source(opened, self._maps.map(opened.fd))
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].segment.close()
        else:
            self._open.move_to_end(name)
        return source

    def _forget(self, name: str) -> None:
        self._open.pop(name).segment.close()

    def close(self) -> None:
        """Close every file, as the end of the reader does. A file with live views stays locked."""
        self._held.clear()
        self._ahead.close()
        _close_all(self._open)


@dataclass(slots=True)
class _Source:
    """A file that is being read."""

    segment: OpenSegment
    mapped: NDArray[np.uint8] | None
    """The mapped file to copy from, or None if the file is read with ``preadv``."""
    read: int = 0
    """The offset at which the last read ended."""
    asked: int = 0
    """The offset up to which readahead was requested."""

    def reads_on(self, ref: SegmentRef) -> bool:
        """Note that a payload is read. Return whether it follows the last one."""
        is_next = 0 <= ref.at - self.read <= MAX_HEADER_BYTES
        self.read = ref.end
        return is_next

    def take_ahead(self, read: int) -> tuple[int, int] | None:
        """Return the bytes to request now behind ``read``, or None if more were requested or there are few."""
        start, end = max(self.asked, read), min(self.segment.nbytes, read + AHEAD_BYTES)
        if end - start < min(STEP_BYTES, self.segment.nbytes - start):
            return None
        self.asked = max(self.asked, end)
        return start, end


def _close_all(opened: OrderedDict[str, _Source]) -> None:
    while opened:
        opened.popitem()[1].segment.close()


def _held_whole(opened: OpenSegment, maps: SegmentMaps) -> NDArray[np.uint8]:
    """Return all bytes of a file, read-only, locked as long as any view of them lives. Raises SegmentGone."""
    try:
        fcntl.flock(opened.fd, fcntl.LOCK_SH)
        _require_same(opened)
    except (PenstockError, OSError) as error:
        opened.close()
        raise error if isinstance(error, PenstockError) else unreadable(opened.name, error) from None
    try:
        return maps.held(opened.fd)
    except OSError as error:
        raise unreadable(opened.name, error) from None


def _require_same(segment: OpenSegment) -> None:
    """Raise SegmentGone if the file's head shows that it was used again since it was opened."""
    if os.pread(segment.fd, len(segment.head), 0) != segment.head:
        raise SegmentGone(f"the payload is in {segment.name}, which has been used again")


def _require_length(segment: OpenSegment, ref: SegmentRef) -> None:
    """Raise SegmentGone if the file ends before the payload does."""
    if (found := os.fstat(segment.fd).st_size) < ref.end:
        raise SegmentGone(f"the payload is in {segment.name}, which ends before it: {found} of {ref.end} bytes")


def _copy_all(source: NDArray[np.uint8], views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        if view.nbytes:
            np.frombuffer(view, dtype=np.uint8)[:] = source[at : at + view.nbytes]
            at += view.nbytes


def _read_all(segment: OpenSegment, views: Sequence[memoryview], at: int, size: int) -> None:
    left = [view for view in views if view.nbytes]
    while left:
        done = os.preadv(segment.fd, left[:VIEWS_A_CALL], at)
        if not done:
            raise SegmentGone(f"the payload is in {segment.name}, which ends before it: {size} bytes were expected")
        at, left = at + done, rest_of(left, done)


# --- notes on checked blocks ------------------------------------------------------------------------------------------

SLOTS = 1 << 15
"""Notes that are kept, in 256 kB of memory: 32 GB of blocks of 1 MB. A newer note replaces an older one."""


class CheckedBlocks:
    """The notes of one folder of segments on the blocks whose checksum a process of this host has compared.

    Other readers need not compare it again. The notes are a table in shared memory, the file ``stream.checked``. They
    exist only on a memory file system, which no other host can have. A segment's name has one content for ever, and a
    header names its segment, so the checksum of a header is a block's key. A lost note costs one more comparison.

    Without the right to write, a process reads the notes of others.
    """

    def __init__(self, folder: Path) -> None:
        """Open the notes, or make them. Where they cannot be had, every block is compared."""
        self._slots: NDArray[np.uint64] | None = None
        self._can_note = False
        if lies_in_memory(folder):
            self._open(folder / NOTES)

    def has(self, header: bytes) -> bool:
        """Return whether a process has compared the payload of this header, byte for byte as its entry has it."""
        if self._slots is None:
            return False
        key = xxhash.xxh3_64_intdigest(header)
        return bool(self._slots[key % SLOTS] == key)

    def note(self, header: bytes) -> None:
        """Note that this process has compared the payload of a header."""
        if self._slots is not None and self._can_note:
            key = xxhash.xxh3_64_intdigest(header)
            self._slots[key % SLOTS] = key

    def _open(self, path: Path) -> None:
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
            try:
                fd = os.open(path, flags | _FLAGS, MODE)
            except OSError:
                continue
            try:
                self._map(fd, can_note=flags != os.O_RDONLY)
            except OSError:  # the file system is full
                pass
            finally:
                os.close(fd)
            return

    def _map(self, fd: int, *, can_note: bool) -> None:
        nbytes = SLOTS * 8
        if not S_ISREG(os.fstat(fd).st_mode):
            return
        if can_note:
            os.posix_fallocate(fd, 0, nbytes)  # without pages, a full file system would be a SIGBUS in the map
        if os.fstat(fd).st_size >= nbytes:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if can_note else 0)
            self._slots = np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection), np.uint64)
            self._can_note = can_note


# --- scanning a file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A record of a segment file."""

    meta: bytes
    """The entry's header, with its ``ref``."""
    header: Header


def scan(opened: OpenSegment) -> Iterator[ScannedRecord]:
    """Yield the records of a file in the order written.

    They end at the first place where no record of the file's token begins. A file that was truncated between two
    records therefore looks like one with fewer records. Compare the number with the expected one.

    Raises:
        BadSegment: A record is damaged.
    """
    info, at = parse_info(opened.head), len(opened.head)
    while at < opened.nbytes:
        first = os.pread(opened.fd, FILE_PAGE, at)
        record = parse_record(first[:RECORD_BYTES], info.token)
        if record is None:
            return
        meta = first[RECORD_BYTES : RECORD_BYTES + record.meta_bytes]
        if len(meta) < record.meta_bytes:
            meta = os.pread(opened.fd, record.meta_bytes, at + RECORD_BYTES)
        try:
            record.check(meta)
            header = parse_header(meta, info.spec, takes_refs=True)
        except (BadEntry, BadSegment) as error:
            raise BadSegment(f"{opened.name} at {at}: {error}") from None
        ref, end = header.ref, at + record.nbytes
        if ref is None or ref.file != opened.name or not at + RECORD_BYTES + len(meta) <= ref.at <= ref.end <= end:
            raise BadSegment(f"{opened.name} at {at}: a record whose payload lies elsewhere")
        if end > opened.nbytes:
            raise BadSegment(f"{opened.name} at {at}: a record of {record.nbytes} bytes, and the file ends before")
        if (header.stream, header.epoch) != (info.stream, info.epoch):
            raise BadSegment(f"{opened.name} at {at}: a record of stream {header.stream}, epoch {header.epoch}")
        yield ScannedRecord(meta, header)
        at = end
