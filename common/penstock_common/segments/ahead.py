"""Asking a disk ahead: what will be read soon is fetched by the kernel while what came before is worked on.

By a thread of its own: finding pages for what comes costs the one who asks as much time as reading it afterwards, to
open a file is to wait behind all that was asked for, and the kernel's own reading ahead is a few hundred kilobytes on
most disks.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from penstock_common.wire.header import PAGE

ASK_BYTES = 1 << 20
"""Asked for in one call: of more a kernel takes only as much as the disk reads at once, and forgets the rest."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class Ahead:
    """Has the kernel fetch parts of files, in the order in which they were named; used by one thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def fetch(self, path: Path, start: int, end: int) -> None:
        """Bytes ``[start, end)`` of a file, and its head, soon; where the kernel cannot, reading them says why."""
        if start >= end:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-ahead")
        with suppress(RuntimeError):  # no thread can be started, or the process ends
            self._thread.submit(_fetch, path, start, end)

    def close(self) -> None:
        """Ends the thread, and forgets what it has not asked for yet."""
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
