"""CPU time and page faults of other processes, as the kernel counts them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process and of its ended children, or 0 if the process itself has ended."""
    fields = _fields(pid)
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def tree_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes and all below them."""
    return sum(cpu_seconds(pid) for pid in _below(pids))


def running_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time, to the nanosecond, of these processes and all below them. One that has ended counts 0."""
    return sum(_clock(pid) for pid in _below(pids))


def page_faults(pids: Iterable[int]) -> int:
    """Return the pages that these processes and all below them got from the kernel so far, without a disk."""
    return sum(int(fields[7]) for pid in _below(pids) if (fields := _fields(pid)))


def _clock(pid: int) -> float:
    # the value of clock_getcpuclockid(3), which Python does not have
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def _below(pids: Iterable[int]) -> set[int]:
    parents = {int(path.name): _parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parent(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def _fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat``, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
