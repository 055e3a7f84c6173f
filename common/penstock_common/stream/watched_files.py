"""The files of a watched folder and their epochs: noted before an epoch is opened, so that each file is in one only.

The producer's `watched_folder` decides what a new file is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Arg, Client, readable, run_script
from penstock_common.stream.streams import Stream, deleted

_TAKE_FILES = load_script("take_files")

FIELDS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class TakenFiles:
    """The files that were taken so far."""

    epochs: dict[str, int] = field(default_factory=dict)
    """Path relative to the folder -> its epoch."""
    due: list[int] = field(default_factory=list)
    """The epochs whose files were taken and that are not known to be made, rising."""

    def files(self, epoch: int) -> tuple[str, ...]:
        """Return the files of one epoch, sorted."""
        return tuple(sorted(path for path, in_epoch in self.epochs.items() if in_epoch == epoch))


@readable(lambda client, stream: stream.keys.watched)
def load_watched(client: Client, stream: Stream) -> TakenFiles:
    """Read all of it, page by page."""
    watched = TakenFiles()
    for raw, value in client.hscan_iter(stream.keys.watched, count=FIELDS_AT_ONCE):
        kind, _, rest = raw.decode().partition(":")
        if kind == "f":
            watched.epochs[rest] = int(value)
        elif kind == "due":
            watched.due.append(int(rest))
    watched.due.sort()
    return watched


def take_files(client: Client, stream: Stream, epoch: int, files: Iterable[str]) -> bool:
    """Take these files for the epoch, all or none. False if another watcher has one. It may be repeated."""
    args: list[Arg] = [stream.id, epoch]
    for path in files:
        args += [path, epoch]
    answer = int(run_script(client, _TAKE_FILES, [stream.keys.watched, stream.keys.meta], args))
    if answer < 0:
        raise deleted(client, stream)
    return answer == 1


def note_made(client: Client, stream: Stream, epoch: int) -> None:
    """Note that the epoch is made."""
    client.hdel(stream.keys.watched, f"due:{epoch}")
