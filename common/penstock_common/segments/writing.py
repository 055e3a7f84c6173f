"""Writing blocks into segments, each as a record of its own; the entry has only the header, with its ``ref``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.format.ref import ALIGN, PAGE, Ref, ref_bytes, with_ref
from penstock_common.format.segment import SegmentInfo, pack_record, place_record
from penstock_common.format.spec import Spec
from penstock_common.format.wire import Fields
from penstock_common.segments.folder import OpenSegment, SegmentFolder, new_token
from penstock_common.segments.mapping import map_to_write

_BLANK = bytes(ALIGN)


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Where the next entry's payload is being made."""

    ref: Ref
    end: int
    """Of the record."""
    places: list[tuple[int, int]]
    """Address and bytes of each field in memory."""
    room: int
    """For the header, with its ref."""

    def holds(self, meta: bytes | memoryview, payload: Sequence[bytes | memoryview]) -> bool:
        """Whether these fields are the very arrays."""
        given = [np.frombuffer(value, dtype=np.uint8) for value in payload]
        are_here = [(array.ctypes.data, array.nbytes) for array in given] == self.places
        return are_here and len(with_ref(bytes(meta), self.ref)) <= self.room


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
        self._reserved: _Reserved | None = None
        self.full: list[str] = []
        """Segments that get nothing more; whoever has everything in them committed says so to the server."""

    @property
    def name(self) -> str:
        """Of the segment written to; '' before the first block."""
        return self._open.name if self._open is not None else ""

    def append(self, fields: Fields) -> tuple[Fields, str]:
        """Writes an entry's payload; returns the fields of the entry that refers to it, and the segment's name.

        With ``is_synced`` it is on the disk when this returns. Raises OSError (ENOSPC) where there is no room, with
        nothing written. A payload that lies in the arrays that were reserved is where it belongs already.
        """
        (meta_name, meta), payload = fields[0], [value for _, value in fields[1:]]
        reserved, self._reserved = self._reserved, None
        if reserved is not None and reserved.holds(meta, payload) and self._open is not None:
            return [(meta_name, self._complete(self._open, meta, reserved))], self._open.name
        if reserved is not None:
            self.close()  # whoever has the arrays may write to them yet: nothing else may lie there
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

    def reserve(self, meta_bytes: int, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Places for the payload fields of the next entry, to be filled and then given to `append`.

        ``meta_bytes`` bounds its header. Raises OSError (ENOSPC). One at a time; another call takes it back.
        """
        self.drop_reserved()
        room = meta_bytes + ref_bytes("0" * 32, len(sizes))
        opened = self._room_for(room, sizes)
        at, end = place_record(self._at, room, sizes)
        ref = Ref(opened.name, at, tuple(sizes))
        mapped = map_to_write(self.folder.path / opened.name, at, end)
        arrays = [mapped[start - at : start - at + size] for start, size in ref.spans()]
        self._reserved = _Reserved(ref, end, [(array.ctypes.data, array.nbytes) for array in arrays], room)
        return arrays

    def drop_reserved(self) -> None:
        """What was reserved will not be given to `append`."""
        if self._reserved is not None:
            self._reserved = None
            self.close()  # as there

    def _complete(self, opened: OpenSegment, meta: bytes | memoryview, reserved: _Reserved) -> bytes:
        whole = with_ref(bytes(meta), reserved.ref)
        before = pack_record(whole, reserved.end - self._at, opened.name[-16:-4])
        write_all(opened.fd, [before.ljust(reserved.ref.at - self._at, b"\0")], self._at)
        if self._is_synced:
            os.fdatasync(opened.fd)
        self._at = reserved.end
        return whole

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
        self._reserved = None
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
