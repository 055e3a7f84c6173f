"""Writing blocks into segments, each as a record of its own; the entry has only the header, with its ``ref``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock_common.format.ref import ALIGN, PAGE, Ref, ref_bytes, with_ref
from penstock_common.format.segment import SegmentInfo, pack_record, place_record
from penstock_common.format.spec import Spec
from penstock_common.format.wire import Fields
from penstock_common.segments.folder import OpenSegment, SegmentFolder, new_token

_BLANK = bytes(ALIGN)


class SegmentWriter:
    """Appends one shard's blocks, one segment after the other; used by one thread."""

    def __init__(
        self, folder: SegmentFolder, stream: tuple[str, str], spec: Spec, epoch: int, partition: int,
        *, segment_bytes: int, is_synced: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self._spec, self._stream = folder, spec, stream
        self._epoch, self._partition = epoch, partition
        self._segment_bytes, self._is_synced = segment_bytes, is_synced
        self._open: OpenSegment | None = None
        self._at = 0
        self.full: list[str] = []
        """Segments that get nothing more; whoever has everything in them committed says so to the server."""

    @property
    def name(self) -> str:
        """Of the segment written to; '' before the first block."""
        return self._open.name if self._open is not None else ""

    def append(self, fields: Fields) -> tuple[Fields, str]:
        """Writes an entry's payload; returns the fields of the entry that refers to it, and the segment's name.

        With ``is_synced`` it is on the disk when this returns. Raises OSError (ENOSPC) where there is no room, with
        nothing written.
        """
        (meta_name, meta), payload = fields[0], [value for _, value in fields[1:]]
        sizes = [memoryview(value).nbytes for value in payload]
        room = len(meta) + ref_bytes("0" * 32, len(sizes))
        opened = self._room_for(room, sizes)
        at, end = place_record(self._at, room, sizes)
        meta = with_ref(bytes(meta), Ref(opened.name, at, tuple(sizes)))
        before = pack_record(meta, end - self._at, opened.name[-16:-4])
        parts: list[bytes | memoryview] = [before.ljust(at - self._at, b"\0")]
        for value, size in zip(payload, sizes, strict=True):
            parts += [value, _BLANK[: -size % ALIGN]]
        write_all(opened.fd, parts, self._at)
        if self._is_synced:
            os.fdatasync(opened.fd)
        self._at = end
        return [(meta_name, meta)], opened.name

    def _room_for(self, meta_bytes: int, sizes: Sequence[int]) -> OpenSegment:
        if self._open is not None:
            if place_record(self._at, meta_bytes, sizes)[1] <= self._open.nbytes:
                return self._open
            self.close()
        info = SegmentInfo(self._stream[1], self._stream[0], self._epoch, self._partition, new_token(), self._spec)
        needed = place_record(2 * PAGE, meta_bytes, sizes)[1]
        self._open = self.folder.take(info, max(self._segment_bytes, needed + 4 * PAGE))
        if self._is_synced:
            self.folder.sync()
        self._at = len(self._open.head)
        if place_record(self._at, meta_bytes, sizes)[1] > self._open.nbytes:
            raise OSError(f"a head of {self._at} bytes leaves no room in a segment of {self._open.nbytes}")
        return self._open

    def close(self) -> None:
        """No more blocks; gives the file back."""
        if self._open is not None:
            self.full.append(self._open.name)
            self._open.release()
            self._open = None


def write_all(fd: int, parts: list[bytes | memoryview], at: int) -> None:
    """Writes the parts one after the other, beginning at an offset; raises OSError."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        done = os.pwritev(fd, left[:1000], at)
        at += done
        while left and done >= len(left[0]):
            done -= len(left[0])
            left.pop(0)
        if left and done:
            left[0] = left[0][done:]
