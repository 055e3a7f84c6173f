"""Segments mapped into memory: arrays to fill in place, and read-only views that are never overwritten.

A map has a descriptor of its own, with a shared lock on the file, and lives as long as any array over it does: so does
the lock, and a file that is locked is neither used again nor cut short. Files are as long as they say before they are
mapped, so nothing here ends in a SIGBUS unless somebody else cuts one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SegmentGone
from penstock_common.format.ref import Ref
from penstock_common.segments.folder import OpenSegment, unreadable

_ALL_AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)


def map_to_write(path: Path, start: int, end: int) -> NDArray[np.uint8]:
    """Bytes [start, end) of a file, to be written in place. Whoever calls has the file locked."""
    base = start - start % mmap.ALLOCATIONGRANULARITY
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        # has a duplicate of the descriptor, and so the lock; all pages at once cost half of what they do one by one
        mapped = mmap.mmap(fd, end - base, flags=mmap.MAP_SHARED | _ALL_AT_ONCE, offset=base)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, dtype=np.uint8)[start - base :]


class MappedSegment:
    """A whole file, to be looked at."""

    def __init__(self, opened: OpenSegment) -> None:
        """Takes the open file over; raises SegmentGone where it was used again before it could be locked."""
        try:
            fcntl.flock(opened.fd, fcntl.LOCK_SH)
            if os.pread(opened.fd, len(opened.head), 0) != opened.head:
                raise SegmentGone(f"the payload lies in {opened.name}, which has been used again")
            self._nbytes = os.fstat(opened.fd).st_size
            if not self._nbytes:
                raise SegmentGone(f"the payload lies in {opened.name}, which is empty")
            self._bytes = mmap.mmap(opened.fd, self._nbytes, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(opened.name, error) from None
        finally:
            opened.close()

    def views(self, ref: Ref) -> list[NDArray[np.uint8]]:
        """The payload fields, read-only; raises SegmentGone where the file ends before them."""
        if ref.end > self._nbytes:
            raise SegmentGone(f"the payload lies in {ref.file}, which ends before it: {ref.end} bytes were expected")
        return [np.frombuffer(self._bytes, dtype=np.uint8, count=size, offset=at) for at, size in ref.spans()]
