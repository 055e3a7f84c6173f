"""The deletion of a stream: first no process may continue, then everything of its name is removed. It may be run again.

The operator's command asks for confirmation.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from penstock_common.errors import DamagedKey, StreamNotFound
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, run_script, server_ms
from penstock_common.stream.entries import group_counts
from penstock_common.stream.groups.presence import ALIVE_MS, liveness_of
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import LAST, StreamKeys, checked_name, is_of_stream, patterns_of_stream
from penstock_common.stream.manifest import find_manifest, retained_epochs
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.removal.release import CHUNK, retire_epoch
from penstock_common.stream.streams import Stream, absence, find_stream

_MARK_DELETING = load_script("mark_deleting")

SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Deleted:
    """The keys and bytes that a deletion removed."""

    stream: str
    epochs: int
    """The retained epochs."""
    nbytes: int
    """The payload bytes."""
    keys: int
    left: str = ""
    """The folder of its segments, if this process does not see it or could not remove all of it."""


def users_of(client: Client, stream: Stream) -> list[str]:
    """Return the readers and writers of the stream, in words.

    The list is empty if none gave a heartbeat for a lease.
    """
    users: list[str] = []
    now = server_ms(client)
    for partition in stream.partitions:
        roster = load_roster(client, partition)
        for (group, member), liveness in sorted(liveness_of([roster], now).items()):
            if liveness.may_be_at_work:
                users.append(f"member {member} of group {group} (seen {_ago(liveness.unseen_ms or 0)})")
        users += [f"a replay of epoch {epoch}" for epoch, till in roster.replays.values() if till > now]
        users += [f"a writer of epoch {epoch} that waits for room" for epoch, _ in roster.waiting]
    return [*dict.fromkeys([*users, *_writers(client, stream, now)])]


def _writers(client: Client, stream: Stream, now: int) -> list[str]:
    """Return the unfinished epochs that were opened or written within a lease. Ids of entries are the server's time."""
    users = []
    for epoch in retained_epochs(client, stream):
        manifest = find_manifest(client, stream, epoch)
        if manifest is None or manifest.is_ended:
            continue
        newest = [
            int(info["last-delivered-id"].partition(b"-")[0])
            for partition in stream.partitions
            if (info := group_counts(client, partition, epoch).get(LAST)) is not None
        ]
        age = now - max([manifest.created_ms, *newest])
        if age < ALIVE_MS:
            users.append(f"a writer of epoch {epoch} (wrote {_ago(age)})")
    return users


def _ago(age_ms: int) -> str:
    return f"{max(0, age_ms) / 1000:.0f} s ago"


def delete_stream(client: Client, name: str) -> Deleted:
    """End the stream for all processes, and remove all its keys, also those that an interrupted deletion left.

    First its meta is marked, so that no process opens or joins anything of it. Then each epoch's state becomes ``gone``
    in every partition, so that no late write or acknowledgement enters. Then all keys go, the meta last. Raises
    StreamNotFound.
    """
    keys = StreamKeys(checked_name("stream", name))
    try:
        stream = find_stream(client, name)
    except DamagedKey:
        stream = None  # no process can open it: there is nothing to mark, and its keys have its name
    epochs, nbytes = 0, 0
    if stream is not None:
        run_script(client, _MARK_DELETING, [keys.meta], [stream.id, time.time_ns() // 1_000_000])
        with suppress(DamagedKey):  # a writer of an epoch that the meta does not name meets the mark, or the key
            epochs, nbytes = _retire_all(client, stream)
    is_left = not _remove_segments(stream)  # before the meta, because only the meta knows where they are
    removed = _sweep(client, name, but=keys.meta)
    removed += int(client.unlink(keys.meta))
    while left := _sweep(client, name):  # keys of a process that had read the meta before the mark
        removed += left
    if not removed:
        raise StreamNotFound(absence(client, name))
    folder = None if stream is None else segments_of(stream)
    return Deleted(name, epochs, nbytes, removed, str(folder.path) if folder is not None and is_left else "")


def _retire_all(client: Client, stream: Stream) -> tuple[int, int]:
    """Make every epoch ``gone`` in every partition. Returns how many were retained, and their bytes."""
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    retained = retained_epochs(client, stream)
    for epoch in {*retained, *(epoch for roster in rosters for epoch in roster.epochs)}:
        manifest = find_manifest(client, stream, epoch)
        known = [roster.epochs.get(epoch) for roster in rosters]
        manifest_id = manifest.id if manifest is not None else next(filter(None, known), "")
        for partition in stream.partitions:
            retire_epoch(client, partition, epoch, manifest_id)
    return len(retained), sum(roster.bytes for roster in rosters)


def _remove_segments(stream: Stream | None) -> bool:
    """Return whether nothing is left of the segments, as far as this process sees."""
    folder = None if stream is None else segments_of(stream)
    return folder is None or (folder.path.exists() and folder.remove())


def _sweep(client: Client, name: str, but: str = "") -> int:
    """Unlink every key of the stream, of any of its lives. Returns how many."""
    found: set[str] = set()
    for pattern in patterns_of_stream(name):
        for key in client.scan_iter(match=pattern, count=SCAN_COUNT):
            text = key.decode("utf-8", "replace")
            if text != but and is_of_stream(text, name):
                found.add(text)
    ordered = sorted(found)
    return sum(int(client.unlink(*ordered[i : i + CHUNK])) for i in range(0, len(ordered), CHUNK))
