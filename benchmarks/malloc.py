"""The settings of malloc in Penstock's workers, as code that every user could write."""

from __future__ import annotations

from contextlib import suppress
from ctypes import CDLL

LARGEST_KEPT = 32 << 20
"""The largest threshold that glibc accepts."""
TRIM, MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""


def keep_freed(_: int = 0) -> None:
    """Make this process keep freed memory for its next allocation, if its C library is glibc."""
    with suppress(OSError, AttributeError):
        library = CDLL(None)
        library.mallopt(MAP, LARGEST_KEPT)
        library.mallopt(TRIM, 8 * LARGEST_KEPT)
