"""Reading payloads out of segments, straight into the arrays of batches.

Out of a kept map where files lie in memory, else by ``preadv``: one copy either way. A file is locked while it is read
from; that it is still the one that was meant, and as long as it has to be, is looked at under the lock.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import PenstockError, SegmentGone
from penstock_common.segments.ahead import Ahead
from penstock_common.segments.folder import OpenSegment, unreadable
from penstock_common.segments.mapping import Maps, lies_in_memory
from penstock_common.wire.header import SegmentRef
from penstock_common.wire.limits import MAX_HEADER_BYTES

OPEN_FILES = 32
"""Kept open; an open file that is not locked keeps nobody from using it again."""
HELD_FILES = 2
"""Kept from being used again, though no view of them may be alive."""
VIEWS_A_CALL = 1000
"""IOV_MAX is 1024."""
AHEAD_BYTES = 32 << 20
"""The disk is asked for so much of a file before it is needed: a disk that is asked for little at once is slow."""
STEP_BYTES = 8 << 20
"""And for no less at a time, but at the end of a file: asking takes a thread its turn."""


class Folder(Protocol):
    """Where segments lie: a stream's own, or an export's."""

    path: Path

    def require(self) -> None:
        """Raises SegmentsUnseen unless this process sees it."""

    def open(self, name: str) -> OpenSegment:
        """A segment to read; raises SegmentGone."""


class SegmentReader:
    """Reads entries' payloads; used by one thread."""

    def __init__(self, folder: Folder, *, gives_views: bool = False, maps: Maps | None = None) -> None:
        self._folder, self.gives_views, self._maps = folder, gives_views, maps or Maps()
        self._held: OrderedDict[str, tuple[OpenSegment, NDArray[np.uint8]]] = OrderedDict()
        """The descriptor is the array's, and open as long as that is here."""
        self._open: OrderedDict[str, _Source] = OrderedDict()
        weakref.finalize(self, _close_all, self._open)
        self._ahead, self._is_told = Ahead(), False
        """Whether somebody says what is read next, so that nothing is guessed."""

    def require(self) -> None:
        """Raises SegmentsUnseen unless this process sees the folder."""
        self._folder.require()

    @cached_property
    def lies_in_memory(self) -> bool:
        """Whether there is no disk to be asked ahead."""
        return lies_in_memory(self._folder.path)

    def read_into(self, ref: SegmentRef, views: Sequence[Sequence[memoryview]]) -> None:
        """Fills the views of each payload field, in wire order; raises SegmentGone, after which they hold anything."""
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
            raise SegmentGone(f"the payload lies in {ref.file}, which cannot be read: {error.strerror}") from None

    def expect(self, ref: SegmentRef) -> None:
        """Has the kernel fetch what will be read soon, for who reads out of order; where it cannot, reading says so."""
        if not self.lies_in_memory:
            self._is_told = True
            self._ahead.fetch(self._folder.path / ref.file, ref.at, ref.end)

    def _ask(self, source: _Source, ref: SegmentRef) -> None:
        """Has the kernel fetch what follows, where a file is read from one end to the other."""
        is_next = 0 <= ref.at - source.read <= MAX_HEADER_BYTES
        source.read = ref.end
        if not is_next or self._is_told:
            return
        start, end = max(source.asked, ref.end), min(source.segment.nbytes, ref.end + AHEAD_BYTES)
        if end - start >= min(STEP_BYTES, source.segment.nbytes - start):
            self._ahead.fetch(self._folder.path / source.segment.name, start, end)
            source.asked = max(source.asked, end)

    def look(self, ref: SegmentRef) -> None:
        """Raises SegmentGone where no whole payload can lie there; it is not read."""
        segment = self._source(ref.file).segment
        try:
            _require_same(segment)
            _require_length(segment, ref)
            if not os.fstat(segment.fd).st_nlink:
                raise SegmentGone(f"the payload lies in {ref.file}, which was removed")
        except SegmentGone:
            self._forget(ref.file)
            raise

    def views(self, ref: SegmentRef) -> list[NDArray[np.uint8]]:
        """The payload fields as they lie in the file, read-only, 64-byte aligned; raises SegmentGone.

        As long as one of these arrays, or a part of it, is alive the file is not used again.
        """
        if ref.file not in self._held:
            opened = self._folder.open(ref.file)
            self._held[ref.file] = opened, _held_whole(opened, self._maps)
            if len(self._held) > HELD_FILES:
                self._held.popitem(last=False)
        self._held.move_to_end(ref.file)
        opened, whole = self._held[ref.file]
        if ref.end > whole.nbytes:
            raise SegmentGone(f"the payload lies in {ref.file}, which ends before it: {ref.end} bytes were expected")
        _require_length(opened, ref)  # somebody may have cut it since: to look at what is not there is a SIGBUS
        return [whole[at : at + size] for at, size in ref.spans()]

    def read(self, ref: SegmentRef) -> list[bytes]:
        """The payload fields, as bytes."""
        buffers = [bytearray(size) for size in ref.sizes]
        self.read_into(ref, [[memoryview(buffer)] for buffer in buffers])
        return [bytes(buffer) for buffer in buffers]

    def _source(self, name: str) -> _Source:
        source = self._open.get(name)
        if source is None:
            opened = self._folder.open(name)
            source = self._open[name] = _Source(opened, self._maps.map(opened.fd))
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].segment.close()
        else:
            self._open.move_to_end(name)
        return source

    def _forget(self, name: str) -> None:
        self._open.pop(name).segment.close()

    def close(self) -> None:
        """Gives every file back, as does the end of the reader; what views are alive of keeps its file."""
        self._held.clear()
        self._ahead.close()
        _close_all(self._open)


@dataclass(slots=True)
class _Source:
    """A file that is read from."""

    segment: OpenSegment
    mapped: NDArray[np.uint8] | None
    """To be copied from where it lies in memory; None where it is to be read."""
    read: int = 0
    """Where the last reading of it ended."""
    asked: int = 0
    """Up to where the disk was asked for it, in one go with that."""


def _close_all(opened: OrderedDict[str, _Source]) -> None:
    while opened:
        opened.popitem()[1].segment.close()


def _held_whole(opened: OpenSegment, maps: Maps) -> NDArray[np.uint8]:
    """All bytes of a file, read-only, locked as long as any view of them lives; raises SegmentGone."""
    try:
        fcntl.flock(opened.fd, fcntl.LOCK_SH)
        _require_same(opened)
        if not os.fstat(opened.fd).st_size:
            raise SegmentGone(f"the payload lies in {opened.name}, which is empty")
    except (PenstockError, OSError) as error:
        opened.close()
        raise error if isinstance(error, PenstockError) else unreadable(opened.name, error) from None
    try:
        return maps.held(opened.fd)
    except OSError as error:
        raise unreadable(opened.name, error) from None


def _require_same(segment: OpenSegment) -> None:
    """Its head says whether it has been used again since it was opened; raises SegmentGone."""
    if os.pread(segment.fd, len(segment.head), 0) != segment.head:
        raise SegmentGone(f"the payload lies in {segment.name}, which has been used again")


def _require_length(segment: OpenSegment, ref: SegmentRef) -> None:
    """Raises SegmentGone where the file does not reach as far."""
    if (found := os.fstat(segment.fd).st_size) < ref.end:
        raise SegmentGone(f"the payload lies in {segment.name}, which ends before it: {found} of {ref.end} bytes")


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
            raise SegmentGone(f"the payload lies in {segment.name}, which ends before it: {size} bytes were expected")
        at += done
        while left and done >= left[0].nbytes:
            done -= left[0].nbytes
            left.pop(0)
        if left and done:
            left[0] = left[0][done:]
