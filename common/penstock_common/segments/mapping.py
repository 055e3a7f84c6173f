"""Segments mapped into memory: arrays to fill, bytes to copy from, and views that are never overwritten.

Page faults of a file cost twice what copying its bytes costs. Files of a memory file system are used again and again,
and therefore stay mapped. A file on a disk is read once, where ``pread`` is as fast as a map.

A kept map holds no lock, so it may be read only while something else holds one. An array from `held` keeps its file
locked as long as the array or a part of it lives, and a locked file is neither used again nor truncated. Lengths are
checked under the lock: a SIGBUS needs another process that truncates the file in that moment.
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

MAPPED_BYTES = 2 << 30
"""Bytes of files that a process keeps mapped. The file system owns their pages, but they count for each process."""
_ALL_AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)
"""Mapping all pages at once costs half of what single page faults cost."""
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
    """Return whether a folder is on a memory file system. False for a folder that is gone."""
    try:
        return _is_memory(path.stat().st_dev)
    except OSError:
        return False


class SegmentMaps:
    """The files of one folder that a process keeps mapped, for all its readers and writers of the folder."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, bool], mmap.mmap] = {}
        """(Device, inode, whether to write) -> map. It keeps its inode, so no other file gets that number."""
        self._lock = threading.Lock()

    def map(self, fd: int, *, to_write: bool = False) -> NDArray[np.uint8] | None:
        """Return all bytes of a file on a memory file system. None for other files, or if the limit is reached.

        The array may be used only up to the file's length, and only while this process has the file locked.
        """
        stat = os.fstat(fd)
        if not _is_memory(stat.st_dev) or not stat.st_size:
            return None
        key = stat.st_dev, stat.st_ino, to_write
        with self._lock:
            if key in self._kept and len(self._kept[key]) != stat.st_size:  # its next use needs another size
                del self._kept[key]
            if key not in self._kept:
                if not self._has_room(stat.st_size):
                    self._forget_dead()
                if not self._has_room(stat.st_size):
                    return None
                try:
                    # a map duplicates its descriptor with its locks, so it gets one of its own, without locks
                    own = os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if to_write else os.O_RDONLY) | os.O_CLOEXEC)
                    try:
                        self._kept[key] = _map(own, stat.st_size, to_write)
                    finally:
                        os.close(own)
                except OSError:
                    return None
            return np.frombuffer(self._kept[key], dtype=np.uint8)

    def _has_room(self, nbytes: int) -> bool:
        return nbytes + sum(map(len, self._kept.values())) <= MAPPED_BYTES

    def _forget_dead(self) -> None:
        """Drop the maps of removed files: a file is truncated to 0 bytes before it is removed."""
        for key in [key for key, mapped in self._kept.items() if not mapped.size()]:
            del self._kept[key]

    def held(self, fd: int, *, to_write: bool = False) -> NDArray[np.uint8]:
        """Return all bytes of a file, locked until the last part of the array is gone.

        The array takes over the descriptor with its shared lock.

        Raises:
            OSError: The file cannot be mapped. The descriptor is closed.
        """
        try:
            array = self.map(fd, to_write=to_write)
            if array is None:
                array = np.frombuffer(_map(fd, os.fstat(fd).st_size, to_write), dtype=np.uint8)
        except BaseException:
            os.close(fd)
            raise
        # not at the end of the process, where the kernel does it
        weakref.finalize(array, _give_back, fd, os.getpid()).atexit = False
        return array


_shared: weakref.WeakValueDictionary[Path, SegmentMaps] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def maps_of(folder: Path) -> SegmentMaps:
    """Return the maps of a folder of segments, which all callers share as long as one keeps them."""
    with _sharing:
        found = _shared.get(folder)
        if found is None:
            found = _shared[folder] = SegmentMaps()
        return found


def _map(fd: int, nbytes: int, to_write: bool) -> mmap.mmap:
    at_once = _ALL_AT_ONCE if _is_memory(os.fstat(fd).st_dev) else 0
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if to_write else 0)
    try:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | at_once, prot=protection)
    except ValueError as error:  # it was truncated between the two checks
        raise OSError(errno.ESTALE, str(error)) from None


def _give_back(fd: int, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked since shares the lock and must not end it
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
