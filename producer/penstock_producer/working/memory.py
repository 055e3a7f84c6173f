"""How much memory a process holds for itself, and how much this machine, or the container around it, has. Linux' /proc.

Where there is no /proc nothing is known, and nothing is limited.
"""

from __future__ import annotations

import os
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of cgroups 2 and 1: bytes, or ``max``."""


_LARGEST_KEPT = 32 << 20
"""glibc takes no larger threshold."""
_TRIM, _MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""


def keep_freed() -> None:
    """Has this process keep memory that it freed for its next allocation, where its C library is glibc.

    Else an image's pixels are given back after each sample, and every page of the next is a fault: a third of the time
    that decoding a photograph takes.
    """
    with suppress(OSError, AttributeError):
        library = CDLL(None)
        library.mallopt(_MAP, _LARGEST_KEPT)
        library.mallopt(_TRIM, 8 * _LARGEST_KEPT)


def held_bytes(pid: int) -> int:
    """Memory that would be free without this process: what forked processes share is nobody's. 0 if it is not known."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def machine_bytes() -> int | None:
    """Of the machine, or of the container if that has less."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            memory = min(memory, int(Path(path).read_text()))
    return memory
