"""Readahead: the kernel fetches what will be read soon from the disk while earlier data is in use.

A thread of its own asks, because asking takes as long as reading: the kernel finds pages for the data, and opening a
file waits behind everything asked for before. The kernel's own readahead is a few hundred kilobytes on most disks.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from penstock_common.wire.header import PAGE

ASK_BYTES = 1 << 20
"""The bytes of one request. Of a larger request, the kernel fetches what the disk reads at once and drops the rest."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class Readahead:
    """Asks the kernel to fetch parts of files, in the order of the calls. For use by one thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def fetch(self, path: Path, start: int, end: int) -> None:
        """Ask for bytes ``[start, end)`` of a file and for its head.

        A failure shows when the bytes are read.
        """
        if start >= end:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-ahead")
        with suppress(RuntimeError):  # no thread can be started, or the process ends
            self._thread.submit(_fetch, path, start, end)

    def close(self) -> None:
        """End the thread and drop the requests it has not made yet."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


def _fetch(path: Path, start: int, end: int) -> None:
    with suppress(OSError):
        fd = os.open(path, _FLAGS)
        try:
            for at, until in ((0, PAGE), *((at, min(at + ASK_BYTES, end)) for at in range(start, end, ASK_BYTES))):
                os.posix_fadvise(fd, at, until - at, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
