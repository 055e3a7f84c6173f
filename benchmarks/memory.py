"""Resident memory of other processes, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """Of one process, in bytes."""

    whole: int
    """All pages, also those that others map: what `ps` shows as RSS."""
    own: int
    """Pages that nobody else has, so what its end gives back."""


def resident(pid: int) -> Resident:
    """Zeros of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return Resident(0, 0)
    kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    return Resident(kilobytes["Rss"] * 1024, (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) * 1024)


def children(pid: int) -> list[int]:
    """Process ids of those that it started and that live."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(child) for child in listed.read_text().split()]
    except OSError:
        return []
