"""Segments that nobody needs any more: found, and made ready to be used again. Any number may do it at once.

Only what the server's registry says to be empty and sealed may go, and what is of a released epoch. A file that a
dead writer left is sealed first, registered or not: a commit of his that comes later is refused. Whoever still reads or
writes a file has a lock on it, which the kernel takes away from the dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.segments.folder import SegmentFolder
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import find_manifest
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.registry import free_segments, registered_segments, seal_segments
from penstock_common.stream.servers.durability import Durability, is_safe
from penstock_common.stream.streams import Stream

GRACE_S = 60.0
"""A file that nobody has in use and that was not written to for so long has a dead writer: one that lives may have
closed it a moment ago, and is about to commit the last of it."""
FOLDER_SHARE = 3 / 2
"""Of the budget: what all files may take; beyond it those that wait to be used again are removed. An epoch that goes as
a whole leaves as many files as the next one needs."""


@dataclass(frozen=True, slots=True)
class Recycled:
    """What one pass did."""

    kept: int = 0
    """Files made ready to be used again."""
    removed: int = 0
    """Files removed."""


def recycle(
    client: Client, stream: Stream, *, grace_s: float = GRACE_S, clock: Callable[[], float] = time.time
) -> Recycled:
    """One pass over a stream's folder; does nothing where there is none, or it is not seen here.

    Raises SegmentsUnseen where its files cannot be used again.
    """
    folder = segments_of(stream)
    if folder is None:
        return Recycled()
    files = folder.names()  # before the registry is read: what is registered meanwhile is not among them
    if not files and not folder.unfinished():
        return Recycled()
    quiet: dict[tuple[int, int], set[str]] = {}
    for name, stat in files.items():
        if clock() - stat.st_mtime >= grace_s and folder.is_unused(name):
            quiet.setdefault(_of(name), set()).add(name)
    free: set[str] = set()
    live: set[tuple[int, int]] = set()
    for partition in stream.partitions:
        for epoch in load_roster(client, partition).epochs:
            live.add((epoch, partition.number))
            free |= _freed_of(client, stream, partition, epoch, quiet.get((epoch, partition.number), set()))
    # of an epoch that was released nothing can be committed any more, however late it comes
    free |= {name for name in files if _of(name) not in live}
    durability = Durability.parse(stream.durability)
    if free and durability.is_synced and not is_safe(client, stream, durability):
        return Recycled()  # a server that loses its last second would refer to them again
    return _give_back(folder, free, int(stream.budget_bytes * FOLDER_SHARE), grace_s, clock)


def _of(name: str) -> tuple[int, int]:
    """(epoch, partition) in a segment's name."""
    epoch, partition, _ = name.split("-")
    return int(epoch), int(partition)


def _freed_of(client: Client, stream: Stream, partition: PartitionKeys, epoch: int, quiet: set[str]) -> set[str]:
    """Those of one epoch in one partition that nothing refers to, now or later; taken off the registry."""
    known = registered_segments(client, partition, epoch)
    left = {name for name in quiet if name not in known or not known[name].is_sealed}
    manifest = find_manifest(client, stream, epoch) if left else None
    if manifest is not None:
        seal_segments(client, partition, manifest, left, for_the_dead=True)
    empty = {name for name, found in known.items() if found.is_sealed and not found.entries}
    return set(free_segments(client, partition, epoch, left | empty))


def _give_back(
    folder: SegmentFolder, free: set[str], most_bytes: int, grace_s: float, clock: Callable[[], float]
) -> Recycled:
    kept = sum(folder.give_back(name, keep=True) for name in sorted(free))
    spare = sorted(folder.spare().items(), key=lambda item: item[1].st_size)
    total = sum(stat.st_size for stat in (*folder.names().values(), *dict(spare).values()))
    removed = 0
    for name, stat in spare:  # those that were cut short first, and those that are too small for most
        if (total > most_bytes or not stat.st_size) and folder.give_back(name, keep=False):
            total, removed = total - stat.st_size, removed + 1
    for name, stat in folder.unfinished().items():
        if clock() - stat.st_mtime >= grace_s and folder.give_back(name, keep=False):
            removed += 1
    return Recycled(kept, removed)
