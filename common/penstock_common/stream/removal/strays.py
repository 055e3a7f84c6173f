"""Folders of segments whose stream is gone: its server was emptied, or SIGKILL ended server and run together.

Nothing removes them automatically: another server may have a stream of that name, whose trainers read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock_common.segments.folder import SegmentFolder, read_mark
from penstock_common.stream.commands import Client
from penstock_common.stream.streams import find_stream

QUIET_S = 600.0
"""A folder that was written more recently is in use."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A folder that belongs to no stream of a server."""

    folder: SegmentFolder
    nbytes: int
    quiet_s: float
    """The time since it was last written."""
    is_in_use: bool
    """Whether some process reads or writes a file of it now, or did a moment ago."""


def find_strays(client: Client, root: Path, clock: Callable[[], float] = time.time) -> list[Stray]:
    """Return the folders below ``root`` that no stream of this server has, by name."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        folder = _folder_at(path)
        if folder is None:
            continue
        stream = find_stream(client, folder.stream) if folder.stream else None
        if stream is None or stream.id != folder.stream_id:
            found.append(_stray(folder, clock()))
    return found


def _folder_at(path: Path) -> SegmentFolder | None:
    """Return the folder, or None if the path is no stream's folder."""
    try:
        stream_id = read_mark(path)
    except OSError:
        return None
    name = path.name.removesuffix(f".{stream_id}")
    return SegmentFolder(path.parent, name, stream_id) if stream_id and name != path.name else None


def _stray(folder: SegmentFolder, now: float) -> Stray:
    files = {**folder.names(), **folder.spare(), **folder.unfinished()}
    newest = max((stat.st_mtime for stat in files.values()), default=folder.path.stat().st_mtime)
    quiet_s = now - newest
    is_locked = any(not folder.is_unused(name) for name in files)
    return Stray(folder, sum(stat.st_size for stat in files.values()), quiet_s, is_locked or quiet_s < QUIET_S)
