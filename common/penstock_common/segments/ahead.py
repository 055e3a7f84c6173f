"""Asking a disk ahead: what will be read soon is fetched by the kernel while what came before is worked on.

By a thread of its own: finding pages for what comes costs the one who asks as much time as reading it afterwards, and
the kernel's own reading ahead is done by the reader, a few hundred kilobytes at a time on most disks.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

ASK_BYTES = 1 << 20
"""Asked for in one call: of more a kernel takes only as much as the disk reads at once, and forgets the rest."""


class Ahead:
    """Has the kernel fetch parts of files, in the order in which they were named; used by one thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def fetch(self, fd: int, start: int, end: int) -> None:
        """Bytes ``[start, end)`` of an open file, soon; where the kernel cannot, reading them says why."""
        if start >= end:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-ahead")
        try:
            own = os.dup(fd)  # the file may be closed, and its number be another's, before its turn comes
        except OSError:
            return
        try:
            self._thread.submit(_fetch, own, start, end)
        except RuntimeError:  # no thread can be started, or the process ends
            os.close(own)

    def close(self) -> None:
        """Ends the thread, after what was named."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def _fetch(fd: int, start: int, end: int) -> None:
    with suppress(OSError):
        for at in range(start, end, ASK_BYTES):
            os.posix_fadvise(fd, at, min(ASK_BYTES, end - at), os.POSIX_FADV_WILLNEED)
    os.close(fd)
