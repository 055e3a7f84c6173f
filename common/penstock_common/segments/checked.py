"""Notes on the blocks whose checksum a process of this host has compared. Other readers need not compare it again.

The notes are a table in shared memory, the file ``stream.checked`` in the segments' folder. They exist only on a memory
file system, which no other host can have. A segment's name has one content for ever, and a header names its segment,
so the checksum of a header is a block's key. A lost note costs one more comparison.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from stat import S_ISREG

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock_common.segments.folder import MARK, MODE
from penstock_common.segments.mapping import lies_in_memory

NOTES = f"{MARK}.checked"
"""The file's name. The deletion of a stream removes every file whose name begins with ``stream.``."""
SLOTS = 1 << 15
"""Notes that are kept, in 256 kB of memory: 32 GB of blocks of 1 MB. A newer note replaces an older one."""
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CheckedBlocks:
    """The notes of one folder of segments. Without the right to write, a process reads those of others."""

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
