"""The writer of segments: each block becomes a record, and the entry has only the header with its ``ref``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.segments.folder import VIEWS_A_CALL, OpenSegment, SegmentFolder, new_token, sync
from penstock_common.segments.mapping import maps_of
from penstock_common.wire.codec import Fields
from penstock_common.wire.header import FILE_PAGE, SegmentRef, aligned, ref_bytes, with_ref
from penstock_common.wire.segment import SegmentInfo, place_record, record_parts, rest_of
from penstock_common.wire.spec import Spec

UNUSED_SHARE = 1 / 4
"""The share of a file from which on its unused end goes back to the file system. The shards of a stream whose samples
differ in size end anywhere in their last file."""
LEAST_SHARE = 1 / 4
"""The share of a new file that a used one must have, so that files do not get smaller from one use to the next."""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """The place in which the next entry's payload is made."""

    at: int
    """The offset in the file."""
    end: int
    """The offset at which the record must end."""
    address: int
    """The memory address of offset ``at``."""
    header_bytes: int
    """The bytes for the header with its ref."""

    def meta_of(
        self, name: str, meta: bytes | memoryview, payload: Sequence[bytes | memoryview]
    ) -> tuple[bytes, SegmentRef] | None:
        """Return the header with its ref, and the ref, or None unless the payload is here in an entry's layout."""
        arrays = [np.frombuffer(value, dtype=np.uint8) for value in payload]
        ref = SegmentRef(name, self.at, tuple([array.nbytes for array in arrays]))
        shift, whole = self.address - self.at, with_ref(bytes(meta), ref)
        lies = zip(arrays, ref.spans(), strict=True)
        are_here = all(not size or array.ctypes.data == at + shift for array, (at, size) in lies)
        return (whole, ref) if are_here and ref.end <= self.end and len(whole) <= self.header_bytes else None


class SegmentWriter:
    """Appends one shard's blocks, one segment after the other. For use by one thread."""

    def __init__(
        self, folder: SegmentFolder, stream: tuple[str, str], spec: Spec, epoch: int, partition: int,
        *, segment_bytes: int, is_synced: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.spec, self._stream = folder, spec, stream
        self._epoch, self._partition = epoch, partition
        self._segment_bytes, self._is_synced = segment_bytes, is_synced
        self._maps = maps_of(folder.path)
        self._open: OpenSegment | None = None
        self._at = 0
        self._mapped: NDArray[np.uint8] | None = None
        """The open segment as an array, once samples are made in it."""
        self._address = 0
        """The memory address of the segment's first byte."""
        self._is_placed: bool | None = None
        """Whether blocks are made in the open segment itself, or None before that is decided."""
        self._reserved: _Reserved | None = None
        self.full: list[str] = []
        """Segments that are full. Their owner tells the server once everything in them is committed."""

    @property
    def name(self) -> str:
        """Return the name of the open segment, or '' before the first block."""
        return self._open.name if self._open is not None else ""

    def append(self, fields: Fields) -> tuple[Fields, str]:
        """Write an entry's payload, and return the fields of the entry that refers to it and the segment's name.

        A payload in the reserved arrays is not copied. With ``is_synced`` the payload is on the disk when this returns.

        Raises:
            OSError: Nothing was written; ENOSPC on a full disk.
        """
        (meta_name, meta), payload = fields[0], [value for _, value in fields[1:]]
        reserved = self._reserved
        if reserved is not None and self._open is not None:
            here = reserved.meta_of(self._open.name, meta, payload)
            if here is not None:
                self._write(self._open, *here, [])  # after an error the arrays stay reserved
                self._reserved = None
                return [(meta_name, here[0])], self._open.name
        self._reserved = None
        if reserved is not None:
            self.leave()  # the arrays' owner may still write to them, so the file takes no other block
        sizes = [memoryview(value).nbytes for value in payload]
        header_bytes = len(meta) + ref_bytes("0" * 32, len(sizes))
        opened = self._open_for(header_bytes, sizes)
        ref = SegmentRef(opened.name, place_record(self._at, header_bytes, sizes)[0], tuple(sizes))
        meta = with_ref(bytes(meta), ref)
        self._write(opened, meta, ref, payload)
        return [(meta_name, meta)], opened.name

    def reserve(self, meta_bytes: int, sizes: Sequence[int]) -> NDArray[np.uint8]:
        """Return memory for the payload fields of the next entry, to fill and then give to `append`.

        There is one such place at a time: another call takes it back. Fields may turn out smaller. Each begins at the
        next multiple of 64 bytes after the one before.

        Args:
            meta_bytes: An upper bound of the header's bytes.
            sizes: The largest size of each field, in wire order.

        Raises:
            OSError: There is no space; ENOSPC on a full disk.
        """
        self.drop_reserved()
        header_bytes = meta_bytes + ref_bytes("0" * 32, len(sizes))
        return self._reserve(self._open_for(header_bytes, sizes), header_bytes, sizes)

    def place(self, meta_bytes: int, sizes: Sequence[int]) -> NDArray[np.uint8] | None:
        """Return memory as `reserve` does, for a block that could also be copied here when it is finished.

        Returns:
            None if copying is cheaper than page faults, and while something else is reserved.
        """
        if self._reserved is not None:
            return None
        header_bytes = meta_bytes + ref_bytes("0" * 32, len(sizes))
        opened = self._open_for(header_bytes, sizes)
        if self._is_placed is None:
            self._is_placed = not opened.is_fresh and self._maps.map(opened.fd, to_write=True) is not None
        return self._reserve(opened, header_bytes, sizes) if self._is_placed else None

    def _reserve(self, opened: OpenSegment, header_bytes: int, sizes: Sequence[int]) -> NDArray[np.uint8]:
        at, end = place_record(self._at, header_bytes, sizes)
        if self._mapped is None:
            # with a lock of its own, because arrays may outlive this writer's lock
            fd = os.open(self.folder.path / opened.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)
            self._mapped = self._maps.held(fd, to_write=True)
            self._address = self._mapped.ctypes.data
        self._reserved = _Reserved(at, end, self._address + at, header_bytes)
        return self._mapped[at:end]

    def drop_reserved(self) -> None:
        """Drop the reserved memory, which will not be given to `append`."""
        if self._reserved is not None:
            self.leave()  # the arrays' owner may still write to them

    def _write(self, opened: OpenSegment, meta: bytes, ref: SegmentRef, payload: Sequence[bytes | memoryview]) -> None:
        """Write a record. ``payload`` is the part of its payload that is not in the file yet."""
        write_all(opened.fd, record_parts(opened.name, self._at, ref, meta, payload), self._at)
        if self._is_synced:
            os.fdatasync(opened.fd)
        self._at = aligned(ref.end)

    def _open_for(self, header_bytes: int, sizes: Sequence[int]) -> OpenSegment:
        if self._open is not None:
            if place_record(self._at, header_bytes, sizes)[1] <= self._open.nbytes and _is_whole(self._open):
                return self._open
            self.close()
        info = SegmentInfo(self._stream[1], self._stream[0], self._epoch, self._partition, new_token(), self.spec)
        needed = place_record(2 * FILE_PAGE, header_bytes, sizes)[1]
        needed += 4 * FILE_PAGE
        least = max(int(self._segment_bytes * LEAST_SHARE), needed)
        self._open = self.folder.take(info, max(self._segment_bytes, needed), least)
        if self._is_synced:
            sync(self.folder.path)
        self._at = len(self._open.head)
        if place_record(self._at, header_bytes, sizes)[1] > self._open.nbytes:
            raise OSError(f"a head of {self._at} bytes leaves no space in a segment of {self._open.nbytes}")
        return self._open

    def forget_full(self, names: Sequence[str]) -> None:
        """Forget full segments that the server knows."""
        self.full = [name for name in self.full if name not in names]

    def close(self) -> None:
        """Give the file back, without a large unused end. No more blocks may follow."""
        if self._open is not None and self._reserved is None and self._at > len(self._open.head):
            used = aligned(self._at, FILE_PAGE)
            is_own = self.folder.has(self._open.fd, self._open.name)  # a host that sees no locks may have taken it
            if self._open.nbytes - used > self._open.nbytes * UNUSED_SHARE and is_own and _is_whole(self._open):
                os.ftruncate(self._open.fd, used)
        self.leave()

    def leave(self) -> None:
        """Give the file back as it is, because another process may write to it. No more blocks may follow."""
        self._reserved = self._mapped = self._is_placed = None
        if self._open is not None:
            self.full.append(self._open.name)
            self._open.release()
            self._open = None


def _is_whole(segment: OpenSegment) -> bool:
    """Return whether the file was neither removed nor truncated.

    No reader could find a removed file, and reading a map of a truncated one is a SIGBUS.
    """
    stat = os.fstat(segment.fd)
    return stat.st_nlink > 0 and stat.st_size >= segment.nbytes


def write_all(fd: int, parts: list[bytes | memoryview], at: int) -> None:
    """Write the parts one after another, from an offset on. Raises OSError."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        done = os.pwritev(fd, left[:VIEWS_A_CALL], at)
        at, left = at + done, rest_of(left, done)
