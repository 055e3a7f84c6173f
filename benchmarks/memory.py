"""Resident memory of other processes, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """The memory of one process in bytes."""

    whole: int
    """All pages, including those that other processes map. `ps` shows it as RSS."""
    own: int
    """Pages that no other process has, so that its end frees them."""


def resident(pid: int) -> Resident:
    """Return the memory of a process, with zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return Resident(0, 0)
    kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    return Resident(kilobytes["Rss"] * 1024, (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) * 1024)


def children(pid: int) -> list[int]:
    """Return the process ids of its live children."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(child) for child in listed.read_text().split()]
    except OSError:
        return []
