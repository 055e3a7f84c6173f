"""Readahead asks the disk for all files named, in time, and does not disturb a caller that closes its files."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from penstock_common.segments.folder import SegmentFolder
from penstock_common.segments.reader import AHEAD_BYTES, Readahead, SegmentReader
from penstock_common.wire.header import SegmentRef
from tests.common.segments.test_segments import STREAM, entry, ref_of, writer_in

Large = tuple[SegmentReader, SegmentRef, int]
MANY_BYTES = 48 << 20
"""More than any kernel takes in one call."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def cold_file(path: Path, nbytes: int) -> int:
    """Return an open file of zeros that is out of the page cache where the file system has a disk."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    for _ in range(nbytes >> 20):
        os.write(fd, bytes(1 << 20))
    forget(fd)
    return fd


def forget(fd: int) -> None:
    """Remove a file from the page cache."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def cached(fd: int) -> float:
    """Return the part of a file that is in the page cache."""
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size) as pages:
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(pages)
        try:
            address = ctypes.c_void_p(ctypes.addressof(start))
            assert not _LIBC.mincore(address, ctypes.c_size_t(size), found), os.strerror(ctypes.get_errno())
        finally:
            del start
        return float(np.mean(np.frombuffer(bytes(found), dtype=np.uint8) & 1))


def opened(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since, for example the folder of all descriptors
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(str(folder))]


def eventually(is_so: Callable[[], bool]) -> bool:
    """Wait up to 20 s."""
    deadline = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def test_all_of_what_is_asked_for_comes_however_much_it_is(tmp_path: Path) -> None:
    """A kernel takes only as much of one call as the disk reads at once."""
    fd, ahead = cold_file(tmp_path / "cold", MANY_BYTES), Readahead()
    ahead.fetch(tmp_path / "cold", 0, MANY_BYTES)
    assert eventually(lambda: cached(fd) > 0.999)
    ahead.close()
    os.close(fd)


def test_no_file_stays_open_that_was_asked_for(tmp_path: Path) -> None:
    """A folder may be unmounted, and a file be used again, once no process reads it."""
    ahead = Readahead()
    for number in range(50):
        os.close(cold_file(tmp_path / f"{number}", 1 << 20))
        ahead.fetch(tmp_path / f"{number}", 0, 1 << 20)
    fd = os.open(tmp_path / "49", os.O_RDWR)
    assert eventually(lambda: cached(fd) > 0.999)
    os.close(fd)
    assert eventually(lambda: not opened(tmp_path))
    ahead.close()


def test_what_cannot_be_asked_for_harms_nobody(tmp_path: Path) -> None:
    """Readahead is optional: a later read of such a file reports the error."""
    ahead = Readahead()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("cold")
    for name in ("gone", "pipe", "link"):
        ahead.fetch(tmp_path / name, 0, 1 << 20)
    fd = cold_file(tmp_path / "cold", 1 << 20)
    for _ in range(2):  # behind those, and again after `close`, which does not end the reader's use
        ahead.fetch(tmp_path / "cold", 0, 1 << 20)
        assert eventually(lambda: cached(fd) > 0.999)
        ahead.close()
        forget(fd)
    os.close(fd)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Large]:
    """Return a segment twice as large as the readahead, out of the page cache: its reader, its first block, and
    itself.
    """
    folder = SegmentFolder(tmp_path, "train", STREAM)
    folder.make()
    writer = writer_in(folder, 2 * AHEAD_BYTES)
    first = ref_of(writer.append(entry(0))[0])
    (path,) = folder.path.glob("*.seg")
    fd = os.open(path, os.O_RDWR)
    os.truncate(fd, 2 * AHEAD_BYTES)
    forget(fd)
    reader = SegmentReader(folder)
    yield reader, first, fd
    reader.close()
    os.close(fd)


def test_who_reads_from_one_end_has_the_rest_asked_for(large: Large) -> None:
    """After the first block, the rest is requested, and no more than the limit."""
    reader, first, fd = large
    reader.read(first)
    assert eventually(lambda: cached(fd) > 0.45)
    assert cached(fd) < 0.8


def test_who_says_what_comes_next_has_that_asked_for_and_nothing_else(large: Large) -> None:
    """Out of order, the next bytes of the file are not the next to be read."""
    reader, first, fd = large
    reader.expect(SegmentRef(first.file, AHEAD_BYTES, (AHEAD_BYTES // 2,)))
    assert eventually(lambda: cached(fd) > 0.24)
    reader.read(first)
    time.sleep(0.2)
    assert cached(fd) < 0.45
