"""How much memory a process holds for itself, and how much this machine, or the container around it, has. Linux' /proc.

Where there is no /proc nothing is known, and nothing is limited.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of cgroups 2 and 1: bytes, or ``max``."""


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
