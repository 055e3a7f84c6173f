"""Reading payloads out of segments, straight into the arrays of batches.

By ``preadv``, not through a map: one copy all the same, and a file that somebody cut short is an error, not a SIGBUS. A
file is locked while it is read from; that it is still the one that was meant is looked at under the lock.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SegmentGone
from penstock_common.format.limits import MAX_HEADER_BYTES
from penstock_common.format.ref import Ref
from penstock_common.segments.folder import OpenSegment
from penstock_common.segments.mapping import MappedSegment

OPEN_FILES = 32
"""Kept open; an open file that is not locked keeps nobody from using it again."""
MAPPED_FILES = 2
"""Kept mapped, and so kept from being used again, though no view of them may be alive."""
VIEWS_A_CALL = 1000
"""IOV_MAX is 1024."""
AHEAD_BYTES = 32 << 20
"""The disk is asked for so much of a file before it is needed: a disk that is asked for little at once is slow."""


class Folder(Protocol):
    """Where segments lie: a stream's own, or an export's."""

    def require(self) -> None:
        """Raises SegmentsUnseen unless this process sees it."""

    def open(self, name: str) -> OpenSegment:
        """A segment to read; raises SegmentGone."""


class SegmentReader:
    """Reads entries' payloads; used by one thread."""

    def __init__(self, folder: Folder, *, gives_views: bool = False) -> None:
        self._folder, self.gives_views = folder, gives_views
        self._mapped: OrderedDict[str, MappedSegment] = OrderedDict()
        self._open: OrderedDict[str, OpenSegment] = OrderedDict()
        weakref.finalize(self, _close_all, self._open)
        self._last: tuple[str, int, int] = ("", 0, 0)
        """The file read from, up to where, and up to where the disk was asked for it."""

    def require(self) -> None:
        """Raises SegmentsUnseen unless this process sees the folder."""
        self._folder.require()

    def read_into(self, ref: Ref, views: Sequence[Sequence[memoryview]]) -> None:
        """Fills the views of each payload field, in wire order; raises SegmentGone, after which they hold anything."""
        segment = self._segment(ref.file)
        try:
            fcntl.flock(segment.fd, fcntl.LOCK_SH)
            try:
                # the head says whether it has been used again since it was opened
                if os.pread(segment.fd, len(segment.head), 0) != segment.head:
                    raise SegmentGone(f"the payload lies in {ref.file}, which has been used again")
                self._ask(segment, ref)
                for (at, size), pieces in zip(ref.spans(), views, strict=True):
                    _read_all(segment, pieces, at, size)
            finally:
                fcntl.flock(segment.fd, fcntl.LOCK_UN)
        except (SegmentGone, OSError) as error:
            self._open.pop(ref.file).close()
            if isinstance(error, SegmentGone):
                raise
            raise SegmentGone(f"the payload lies in {ref.file}, which cannot be read: {error.strerror}") from None

    def expect(self, ref: Ref) -> None:
        """Has the kernel fetch what will be read soon, for who reads out of order; where it cannot, reading says so."""
        with suppress(SegmentGone):
            segment = self._segment(ref.file)
            os.posix_fadvise(segment.fd, ref.at, ref.end - ref.at, os.POSIX_FADV_WILLNEED)

    def _ask(self, segment: OpenSegment, ref: Ref) -> None:
        """Has the kernel fetch what follows, where a file is read from one end to the other."""
        name, end, asked = self._last
        if name == segment.name and 0 <= ref.at - end <= MAX_HEADER_BYTES:
            if asked - ref.at < AHEAD_BYTES // 2:
                start, asked = max(asked, ref.at), min(segment.nbytes, ref.at + AHEAD_BYTES)
                if asked > start:
                    os.posix_fadvise(segment.fd, start, asked - start, os.POSIX_FADV_WILLNEED)
        else:
            asked = 0
        self._last = segment.name, ref.end, asked

    def look(self, ref: Ref) -> None:
        """Raises SegmentGone where no whole payload can lie there; it is not read."""
        segment = self._segment(ref.file)
        try:
            if os.pread(segment.fd, len(segment.head), 0) != segment.head:
                raise SegmentGone(f"the payload lies in {ref.file}, which has been used again")
            if os.fstat(segment.fd).st_size < ref.end or not os.fstat(segment.fd).st_nlink:
                raise SegmentGone(f"the payload lies in {ref.file}, which was removed or cut short")
        except SegmentGone:
            self._open.pop(ref.file).close()
            raise

    def views(self, ref: Ref) -> list[NDArray[np.uint8]]:
        """The payload fields as they lie in the file, read-only, 64-byte aligned; raises SegmentGone.

        As long as one of these arrays, or a part of it, is alive the file is not used again.
        """
        if ref.file not in self._mapped:
            self._mapped[ref.file] = MappedSegment(self._folder.open(ref.file))
            if len(self._mapped) > MAPPED_FILES:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(ref.file)
        return self._mapped[ref.file].views(ref)

    def read(self, ref: Ref) -> list[bytes]:
        """The payload fields, as bytes."""
        buffers = [bytearray(size) for size in ref.sizes]
        self.read_into(ref, [[memoryview(buffer)] for buffer in buffers])
        return [bytes(buffer) for buffer in buffers]

    def _segment(self, name: str) -> OpenSegment:
        segment = self._open.get(name)
        if segment is None:
            segment = self._open[name] = self._folder.open(name)
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(name)
        return segment

    def close(self) -> None:
        """Gives every file back, as does the end of the reader; what views are alive of keeps its file."""
        self._mapped.clear()
        _close_all(self._open)


def _close_all(opened: OrderedDict[str, OpenSegment]) -> None:
    while opened:
        opened.popitem()[1].close()


def _read_all(segment: OpenSegment, views: Sequence[memoryview], at: int, size: int) -> None:
    left = [view for view in views if view.nbytes]
    while left:
        done = os.preadv(segment.fd, left[:VIEWS_A_CALL], at)
        if not done:
            raise SegmentGone(f"the payload lies in {segment.name}, which ends before it: {size} bytes were expected")
        at += done
        while left and done >= left[0].nbytes:
            done -= left[0].nbytes
            left.pop(0)
        if left and done:
            left[0] = left[0][done:]
