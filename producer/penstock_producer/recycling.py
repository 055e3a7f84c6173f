"""Segments that nobody needs any more: found, and made ready to be used again. Any number may do it at once.

Needed is what the server's registry names, as long as an entry is left in it or its writer may still add one. A file
that it does not name is left from a crash, or of an epoch that was released. Whoever still reads or writes a file has a
lock on it, which the kernel takes away from the dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.segments.folder import SegmentFolder
from penstock_common.stream.commands import Client
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, find_manifest
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.registry import free_segments, registered_segments, seal_segments
from penstock_common.stream.roster import load_roster
from penstock_common.stream.streams import Stream

GRACE_S = 60.0
"""A file of a dead writer is left alone for so long: a commit that it had sent may still lie in a socket's buffer."""
SPARE_SHARE = 1 / 4
"""Of the budget: so much is kept ready to be used again, what is beyond it is removed."""


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
    """One pass over a stream's folder; does nothing where there is none, or it is not seen here."""
    folder = segments_of(stream)
    if folder is None:
        return Recycled()
    files = folder.names()  # before the registry is read: what is registered meanwhile is not among them
    if not files and not folder.unfinished():
        return Recycled()
    quiet = {name for name, stat in files.items() if clock() - stat.st_mtime >= grace_s}
    needed: set[str] = set()
    freed: set[str] = set()
    live: set[tuple[int, int]] = set()
    for partition in stream.partitions:
        for epoch in load_roster(client, partition).epochs:
            live.add((epoch, partition.number))
            manifest = find_manifest(client, stream, epoch)
            if manifest is not None:
                free, held = _freed_of(client, partition, manifest, folder, quiet)
                freed |= free
                needed |= held
    # of an epoch that was released nothing can be committed any more, however late it comes
    released = {name for name in files if _of(name) not in live}
    orphans = {name for name in files if name not in needed and name in freed | quiet | released}
    return _give_back(folder, orphans, int(stream.budget_bytes * SPARE_SHARE), grace_s, clock)


def _of(name: str) -> tuple[int, int]:
    """(epoch, partition) in a segment's name."""
    epoch, partition, _ = name.split("-")
    return int(epoch), int(partition)


def _freed_of(
    client: Client, partition: PartitionKeys, manifest: Manifest, folder: SegmentFolder, quiet: set[str]
) -> tuple[set[str], set[str]]:
    """(those just taken off the registry, those it still names) of one epoch in one partition."""
    known = registered_segments(client, partition, manifest.epoch)
    if not known:
        return set(), set()
    # whoever wrote them died before it could say that they get no more
    left = [name for name, found in known.items() if not found.is_sealed and name in quiet and folder.is_unused(name)]
    seal_segments(client, partition, manifest, left)
    empty = [name for name, found in known.items() if not found.entries and (found.is_sealed or name in left)]
    freed = set(free_segments(client, partition, manifest.epoch, empty))
    return freed, set(known) - freed


def _give_back(
    folder: SegmentFolder, orphans: set[str], spare_bytes: int, grace_s: float, clock: Callable[[], float]
) -> Recycled:
    spare = sum(stat.st_size for stat in folder.spare().values())
    sizes = folder.names()
    kept = removed = 0
    for name in sorted(orphans):
        size = sizes[name].st_size if name in sizes else 0
        keep = spare + size <= spare_bytes
        if folder.give_back(name, keep=keep):
            kept, removed, spare = kept + keep, removed + (not keep), spare + size * keep
    for name, stat in folder.unfinished().items():
        if clock() - stat.st_mtime >= grace_s and folder.give_back(name, keep=False):
            removed += 1
    return Recycled(kept, removed)
