"""Segments mapped into memory: places to fill, bytes to copy from, and views that are never overwritten.

Finding a file's pages costs twice what copying its bytes costs. Files of a memory file system, which are used again
and again, are therefore kept mapped; on a disk, where a file is read once, ``pread`` is as fast and needs no map. A
kept map holds no lock, so it may be looked at only while something else does. An array over a file that is `held` has
it locked as long as the array, or a part of it, lives; a file that is locked is neither used again nor cut short.
Lengths are looked at under the lock: nothing here ends in a SIGBUS unless somebody else cuts a file in that moment.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KEPT_BYTES = 2 << 30
"""Of files kept mapped in one process: their pages are the file system's, but are counted to whoever maps them."""
_ALL_AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)
"""All pages at once cost half of what they do one by one."""
_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")


@lru_cache(maxsize=16)
def _is_memory(device: int) -> bool:
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    return any(line[2] == name and line[line.index("-") + 1] in _MEMORY for line in mounts)


def lies_in_memory(path: Path) -> bool:
    """Whether a folder is one of a memory file system; one that is gone is none, and who reads from it is told so."""
    try:
        return _is_memory(path.stat().st_dev)
    except OSError:
        return False


class Maps:
    """The files of a folder that a process keeps mapped, for all its readers and writers of that folder."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int, bool], mmap.mmap] = {}
        """(Device, inode, bytes, whether to write) -> map. It keeps its inode, so no other file gets that number."""
        self._lock = threading.Lock()

    def map(self, fd: int, *, to_write: bool = False) -> NDArray[np.uint8] | None:
        """All bytes of a file of a memory file system; None on any other, or where enough is mapped.

        To be touched only as far as the file reaches, and while this process has it locked.
        """
        stat = os.fstat(fd)
        if not _is_memory(stat.st_dev) or not stat.st_size:
            return None
        key = stat.st_dev, stat.st_ino, stat.st_size, to_write
        with self._lock:
            if key not in self._kept:
                if not self._has_room(stat.st_size):
                    self._forget_dead()
                if not self._has_room(stat.st_size):
                    return None
                try:
                    # a map has a duplicate of its descriptor, and so its locks: of one opened for this, which has none
                    own = os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if to_write else os.O_RDONLY) | os.O_CLOEXEC)
                    try:
                        self._kept[key] = _map(own, stat.st_size, to_write)
                    finally:
                        os.close(own)
                except OSError:
                    return None
            return np.frombuffer(self._kept[key], dtype=np.uint8)

    def _has_room(self, nbytes: int) -> bool:
        return nbytes + sum(kept for _, _, kept, _ in self._kept) <= KEPT_BYTES

    def _forget_dead(self) -> None:
        """Files are cut to nothing before they are removed."""
        for key in [key for key, mapped in self._kept.items() if not mapped.size()]:
            del self._kept[key]

    def held(self, fd: int, *, to_write: bool = False) -> NDArray[np.uint8]:
        """All bytes of a file. Takes the descriptor over, with its shared lock: given back with the last part of them.

        Raises OSError; the descriptor is closed then.
        """
        try:
            array = self.map(fd, to_write=to_write)
            if array is None:
                array = np.frombuffer(_map(fd, os.fstat(fd).st_size, to_write), dtype=np.uint8)
        except BaseException:
            os.close(fd)
            raise
        # not at the end of the process: the kernel does it then
        weakref.finalize(array, _give_back, fd, os.getpid()).atexit = False
        return array


_shared: weakref.WeakValueDictionary[Path, Maps] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def maps_of(folder: Path) -> Maps:
    """Of a folder of segments; they are kept as long as somebody has this."""
    with _sharing:
        found = _shared.get(folder)
        if found is None:
            found = _shared[folder] = Maps()
        return found


def _map(fd: int, nbytes: int, to_write: bool) -> mmap.mmap:
    at_once = _ALL_AT_ONCE if _is_memory(os.fstat(fd).st_dev) else 0
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if to_write else 0)
    try:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | at_once, prot=protection)
    except ValueError as error:  # it was cut short this very moment
        raise OSError(errno.ESTALE, str(error)) from None


def _give_back(fd: int, owner: int) -> None:
    if os.getpid() == owner:  # a process forked meanwhile has the same lock, but not the right to end it
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
