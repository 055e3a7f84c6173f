"""The deletion of a stream: first no process may continue, then everything of its name is removed. It may be run again.

The operator's command asks for confirmation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock_common.errors import DamagedKey, ServerUnavailable, StreamNotFound
from penstock_common.printable import readable_span
from penstock_common.segments.folder import SegmentFolder, read_mark
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Arg, Call, Client, run_script, run_scripts, server_ms
from penstock_common.stream.directory import strike_stream
from penstock_common.stream.entries import last_given
from penstock_common.stream.groups.losses import forget_losses
from penstock_common.stream.groups.presence import ALIVE_MS, liveness_of
from penstock_common.stream.groups.roster import fetch_rosters, load_roster
from penstock_common.stream.keys import (
    LAST,
    PartitionKeys,
    StreamKeys,
    checked_name,
    id_in_key,
    is_of_stream,
    patterns_of_stream,
)
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest, forget_manifest, retained_epochs
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.ranges import add_to_ranges
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.streams import CHUNK, Stream, absence, find_stream, unlink_named
from penstock_common.waiting import to_stderr

_MARK_DELETING = load_script("mark_deleting")

SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class DeletionResult:
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
    for partition in stream.partitions:
        roster, now = load_roster(client, partition), server_ms(client, partition.roster)
        for (group, member), liveness in sorted(liveness_of([roster], now).items()):
            if liveness.may_be_at_work:
                users.append(f"member {member} of group {group} (seen {readable_span(liveness.unseen_s or 0)} ago)")
        users += [f"a replay of epoch {epoch}" for epoch, till in roster.replays.values() if till > now]
        users += [f"a writer of epoch {epoch} that waits for space" for epoch, _ in roster.waiting]
    return [*dict.fromkeys([*users, *_writers(client, stream, server_ms(client, stream.keys.meta))])]


def _writers(client: Client, stream: Stream, now: int) -> list[str]:
    """Return the unfinished epochs that were opened or written within a lease. Ids of entries are the server's time."""
    users = []
    for epoch in retained_epochs(client, stream):
        manifest = find_manifest(client, stream, epoch)
        if manifest is None or manifest.is_ended:
            continue
        age = age_of_writing(client, stream, manifest, now)
        if age < ALIVE_MS:
            users.append(f"a writer of epoch {epoch} (wrote {readable_span(age / 1000)} ago)")
    return users


def age_of_writing(client: Client, stream: Stream, manifest: Manifest, now: int) -> int:
    """Return the ms since an epoch was opened or written. ``now`` is the server's time."""
    newest = [last_given(client, partition, manifest.epoch).get(LAST, (0, 0)) for partition in stream.partitions]
    return now - max([manifest.created_ms, *(at_ms for at_ms, _ in newest)])


def require_keys(client: Client, name: str) -> None:
    """Raise StreamNotFound if there is nothing to delete: neither a stream nor keys that one left."""
    keys = StreamKeys(checked_name("stream", name))
    if not client.exists(keys.meta) and not any(True for _ in _scan(client, name)):
        raise StreamNotFound(absence(client, name))


def _scan(client: Client, name: str) -> Iterator[str]:
    """Yield every key of the stream, of any of its lives, perhaps more than once."""
    for pattern in patterns_of_stream(name):
        for key in client.scan_iter(match=pattern, count=SCAN_COUNT):
            text = key.decode("utf-8", "replace")
            if is_of_stream(text, name):
                yield text


def delete_stream(client: Client, name: str) -> DeletionResult:
    """End the stream for all processes, and remove all its keys, also those that an interrupted deletion left.

    First its meta is marked, so that no process opens or joins anything of it. Then each epoch's state becomes ``gone``
    in every partition, so that no late write or acknowledgement enters. Then all keys go, the meta last. A stream that
    is made again under the name meanwhile stays as it is.

    Raises:
        StreamNotFound: There is neither the stream nor a key of it.
        ServerUnavailable: A server that holds keys does not answer. The text says whether a part is deleted.
    """
    keys = StreamKeys(checked_name("stream", name))
    try:
        stream = find_stream(client, name)
        own = b"" if stream is None else stream.id.encode()
    except DamagedKey:
        stream, own = None, _id_of(client, keys)  # no process can open it, so there is nothing to mark
    try:
        client.on_each(lambda node: node.time())  # the sweep would find out, but after the epochs are gone
    except ServerUnavailable as error:
        error.of(f"stream {name!r} is left as it was, because any server may have keys of it")
        raise
    if stream is not None:
        run_script(client, _MARK_DELETING, [keys.meta], [stream.id, time.time_ns() // 1_000_000])
    try:
        return _remove(client, keys, stream, own)
    except ServerUnavailable as error:
        rest = f"once every server takes writes, `penstock delete {name}` deletes the rest"
        error.of(f"stream {name!r} is deleted in part; {rest}")
        raise


def _remove(client: Client, keys: StreamKeys, stream: Stream | None, own: bytes) -> DeletionResult:
    """Remove what is left of a stream that is marked, or that no process can open. ``own`` is its id."""
    name = keys.name
    epochs, nbytes = 0, 0
    if stream is not None:
        with suppress(DamagedKey):  # a writer of an epoch that the meta does not name meets the mark, or the key
            epochs, nbytes = _retire_all(client, stream)
    left = _remove_segments(stream)  # before the meta, because only the meta knows where they are
    removed = _sweep(client, keys, own)
    strike_stream(client, name, own)
    removed += unlink_named(client, keys, own, [keys.meta])
    while late := _sweep(client, keys, own):  # keys of a process that had read the meta before the mark
        removed += late
    if not removed:
        raise StreamNotFound(absence(client, name))
    return DeletionResult(name, epochs, nbytes, removed, left)


def _retire_all(client: Client, stream: Stream) -> tuple[int, int]:
    """Make every epoch ``gone`` in every partition. Returns how many were retained, and their bytes."""
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    retained = retained_epochs(client, stream)
    for partition, roster in zip(stream.partitions, rosters, strict=True):
        for epoch, manifest_id in roster.epochs.items():
            retire_epoch(client, partition, epoch, manifest_id)
    return len(retained), sum(roster.bytes for roster in rosters)


def _remove_segments(stream: Stream | None) -> str:
    """Return the folder in which something is left of the segments, as far as this process sees, or ''."""
    folder = None if stream is None else segments_of(stream)
    if folder is None or (folder.path.exists() and folder.remove()):
        return ""
    return str(folder.path)


def _id_of(client: Client, keys: StreamKeys) -> bytes:
    """Return the id of the stream that has the name now, or nothing if there is none or its meta is no hash."""
    with suppress(DamagedKey):
        return client.hget(keys.meta, "id") or b""
    return b""


def _sweep(client: Client, keys: StreamKeys, own: bytes) -> int:
    """Unlink every key of the stream but its meta, of any of its lives but a newer one. Returns how many."""
    found = set(_scan(client, keys.name)) - {keys.meta}
    newest = _id_of(client, keys)  # after the scan: a stream's meta is its first key
    named = sorted(key for key in found if not id_in_key(key, keys.name))
    parts = sorted(
        key for key in found.difference(named) if newest == own or id_in_key(key, keys.name).encode() != newest
    )
    removed = sum(int(client.unlink(*parts[i : i + CHUNK])) for i in range(0, len(parts), CHUNK))
    return removed + unlink_named(client, keys, own, named)


# --- folders without a stream -----------------------------------------------------------------------------------------


QUIET_S = 600.0
"""A folder that was written more recently is kept: its writer may be about to make another file."""


@dataclass(frozen=True, slots=True)
class OrphanFolder:
    """A folder that belongs to no stream of a server."""

    folder: SegmentFolder
    nbytes: int
    quiet_s: float
    """The time since it was last written."""
    is_in_use: bool
    """Whether some process reads or writes a file of it now."""

    @property
    def is_fresh(self) -> bool:
        """Return whether it was written a moment ago, so that it is kept."""
        return self.quiet_s < QUIET_S


def find_orphans(client: Client, root: Path, clock: Callable[[], float] = time.time) -> list[OrphanFolder]:
    """Return the folders below ``root`` that no stream of this server has, by name."""
    found = []
    for folder in _folders_in(root):
        stream = find_stream(client, folder.stream) if folder.stream else None
        if stream is None or stream.id != folder.stream_id:
            found.append(_orphan(folder, clock()))
    return found


def has_segments(root: Path) -> bool:
    """Return whether some folder below ``root`` is that of a stream, on whichever server."""
    return any(True for _ in _folders_in(root))


def _folders_in(root: Path) -> Iterator[SegmentFolder]:
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if (folder := _folder_at(path)) is not None:
            yield folder


def _folder_at(path: Path) -> SegmentFolder | None:
    """Return the folder, or None if the path is no stream's folder."""
    try:
        stream_id = read_mark(path)
    except OSError:
        return None
    name = path.name.removesuffix(f".{stream_id}")
    return SegmentFolder(path.parent, name, stream_id) if stream_id and name != path.name else None


def _orphan(folder: SegmentFolder, now: float) -> OrphanFolder:
    files = {**folder.names(), **folder.spare(), **folder.unfinished()}
    newest = max((stat.st_mtime for stat in files.values()), default=folder.path.stat().st_mtime)
    quiet_s = now - newest
    is_in_use = any(not folder.is_unused(name) for name in files)
    return OrphanFolder(folder, sum(stat.st_size for stat in files.values()), quiet_s, is_in_use)


# --- an epoch ---------------------------------------------------------------------------------------------------------


_RETIRE_EPOCH = load_script("retire_epoch")
_UNLINK_RETIRED = load_script("unlink_retired")
_NOTE_RELEASED = load_script("note_released")
_FORGET_FIELD = load_script("forget_field")


def release_epoch(
    client: Client, stream: Stream, epoch: int, generation: str = "", confirmer: Confirmer | None = None
) -> bool:
    """Set the epoch's state to gone and remove it. False if the roster is no longer of that generation.

    See `unlink_epoch` for the ``confirmer``.
    """
    manifest = find_manifest(client, stream, epoch)
    if manifest is None:
        return False
    if not retire_epoch(client, stream.partitions[0], epoch, manifest.id, generation):
        return False
    # its answer is enough: a half retired epoch must be completed
    unlink_epoch(client, stream, epoch, manifest.id, confirmer=confirmer)
    return True


def retire_epoch(client: Client, partition: PartitionKeys, epoch: int, manifest_id: str, generation: str = "") -> bool:
    """Do the first step in one partition: nothing is written or acknowledged any more. False if the roster changed."""
    keys = [partition.roster, partition.state(epoch)]
    return int(run_script(client, _RETIRE_EPOCH, keys, [generation, epoch, manifest_id])) >= 0


def unlink_epoch(
    client: Client, stream: Stream, epoch: int, manifest_id: str, known_shards: Sequence[int] = (),
    confirmer: Confirmer | None = None, *, is_unused: bool = False,
) -> None:  # fmt: skip
    """Do the second step of a release, also of one that a dead process began, in whichever partition it was.

    On several servers each part waits until the one before is on replicas, as the stream's durability demands. If it is
    not, the rest is left to a later call.

    Args:
        client: Control connection.
        stream: Stream of the epoch.
        epoch: Number of the epoch.
        manifest_id: Id of its manifest.
        known_shards: Shards of an epoch that has no manifest any more.
        confirmer: Says what is on replicas. None makes a new one.
        is_unused: Whether nothing was committed to the epoch. Then no group counts it as lost.
    """
    confirmer = confirmer or Confirmer(client, stream, to_stderr)
    is_apart = confirmer.are_apart(*confirmer.everywhere)
    partitions, own = (stream.partitions, [stream]) if is_apart else ((), [])
    retired, forgotten = confirmer.question(partitions), confirmer.question(own)
    manifest = find_manifest(client, stream, epoch)
    ours = manifest if manifest is not None and manifest.id == manifest_id else None
    args: list[Arg] = ["", epoch, manifest_id, int(is_unused)]
    calls: list[Call] = [([p.roster, p.state(epoch)], args) for p in stream.partitions]
    run_scripts(client, _RETIRE_EPOCH, calls)
    if not retired.is_answered():
        return
    unlinked = confirmer.question(partitions)
    shards: Sequence[int] = begun_shards(client, stream, ours) if ours is not None else known_shards
    _, replies = fetch_rosters(client, stream)
    unlinks: list[Call] = []
    for partition, reply in zip(stream.partitions, replies, strict=True):
        groups = [name[2:].decode() for name in reply if name[:2] == b"g:"]
        keys = _keys_of(stream, partition, epoch, groups, shards)
        unlinks += [
            ([partition.roster, *keys[at : at + CHUNK]], [epoch, manifest_id]) for at in range(0, len(keys), CHUNK)
        ]
    run_scripts(client, _UNLINK_RETIRED, unlinks)
    if not unlinked.is_answered():
        return  # with the manifest, which knows the shards whose keys may come back
    if ours is not None:
        _remember_released(client, stream, epoch)
        forget_losses(client, stream, epoch)
        forget_manifest(client, stream, epoch, manifest_id)
    if forgotten.is_answered():
        run_scripts(client, _FORGET_FIELD, [([p.roster], [f"x:{epoch}", manifest_id]) for p in stream.partitions])


def _remember_released(client: Client, stream: Stream, epoch: int) -> None:
    """Add one number to the ranges in meta, also while other processes do so. A deleted meta does not come back."""
    is_noted = 0
    while not is_noted:
        before = (client.hget(stream.keys.meta, "released") or b"").decode()
        is_noted = run_script(
            client, _NOTE_RELEASED, [stream.keys.meta], [stream.id, before, add_to_ranges(before, epoch)]
        )


def _keys_of(
    stream: Stream, partition: PartitionKeys, epoch: int, groups: Sequence[str], shards: Iterable[int]
) -> list[str]:
    keys = [partition.entries(epoch), partition.segments(epoch), partition.quarantine(epoch)]
    for shard in shards:
        if stream.partition_of(shard) == partition:
            keys += [partition.index(epoch, shard), partition.repairs(epoch, shard)]
            keys += [partition.ledger(epoch, group, shard) for group in groups]
    for group in groups:
        keys += [partition.dead(epoch, group), partition.positions(epoch, group)]
    return [*keys, partition.state(epoch)]
