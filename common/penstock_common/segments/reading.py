"""Reading payloads out of segments, straight into the arrays of batches.

By ``preadv``, not through a map: one copy all the same, and a file that somebody cut short is an error, not a SIGBUS. A
file is locked while it is read from; that it is still the one that was meant is looked at under the lock.
"""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from penstock_common.errors import SegmentGone
from penstock_common.format.ref import Ref
from penstock_common.segments.folder import OpenSegment

OPEN_FILES = 32
"""Kept open; an open file that is not locked keeps nobody from using it again."""
VIEWS_A_CALL = 1000
"""IOV_MAX is 1024."""


class Folder(Protocol):
    """Where segments lie: a stream's own, or an export's."""

    def require(self) -> None:
        """Raises SegmentsUnseen unless this process sees it."""

    def open(self, name: str) -> OpenSegment:
        """A segment to read; raises SegmentGone."""


class SegmentReader:
    """Reads entries' payloads; used by one thread."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._open: OrderedDict[str, OpenSegment] = OrderedDict()

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
                for (at, size), pieces in zip(ref.spans(), views, strict=True):
                    _read_all(segment, pieces, at, size)
            finally:
                fcntl.flock(segment.fd, fcntl.LOCK_UN)
        except (SegmentGone, OSError) as error:
            self._open.pop(ref.file).close()
            if isinstance(error, SegmentGone):
                raise
            raise SegmentGone(f"the payload lies in {ref.file}, which cannot be read: {error.strerror}") from None

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
        """Gives every file back."""
        while self._open:
            self._open.popitem()[1].close()


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
