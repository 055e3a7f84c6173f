"""A stream's segments, for readers and writers of its payloads. There are none if payloads are in the entries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_common.errors import SegmentsUnseen
from penstock_common.segments.folder import INLINE, SegmentFolder, folder_of
from penstock_common.segments.mapping import SegmentMaps, maps_of
from penstock_common.segments.reader import CheckedBlocks, SegmentReader
from penstock_common.server.channel import Command
from penstock_common.server.scripts import load_script
from penstock_common.settings import Settings
from penstock_common.stream.commands import Client, readable, run_script
from penstock_common.stream.entries import describe_entry
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream
from penstock_common.wire.codec import Fields
from penstock_common.wire.header import Header, parse_header
from penstock_common.wire.spec import Spec


def segments_of(stream: Stream) -> SegmentFolder | None:
    """Return the folder of the stream's segments on this host, or None if payloads are in the entries."""
    if stream.payload == INLINE:  # first, because a writer of many shards asks for each of them
        return None
    return folder_of(stream.payload, stream.name, stream.id, Settings.from_environment().segments)


def reader_of(stream: Stream, *, must_see: bool = True, gives_views: bool = False) -> SegmentReader | None:
    """Return the reader of payloads in segments. Raises SegmentsUnseen if this process cannot see them.

    Without ``must_see`` it returns None instead, as for payloads in the entries.
    """
    folder = segments_of(stream)
    if folder is None:
        return None
    try:
        folder.require()
    except SegmentsUnseen:
        if must_see:
            raise
        return None
    checked = CheckedBlocks(folder.path)
    return SegmentReader(folder, gives_views=gives_views, maps=maps_of(folder.path), checked=checked)


def why_unseen(stream: Stream) -> str:
    """Return why this process cannot read the stream's segments, and what helps, or '' if it can or there are none."""
    folder = segments_of(stream)
    try:
        if folder is not None:
            folder.require()
    except SegmentsUnseen as error:
        return str(error)
    return ""


def maps_of_stream(stream: Stream) -> SegmentMaps | None:
    """Return the maps of a stream's segments. Later readers and writers use them again while the caller keeps them."""
    folder = segments_of(stream)
    return None if folder is None else maps_of(folder.path)


@dataclass(frozen=True, slots=True)
class PayloadStorage:
    """The storage of a stream's payloads, and the space that its files take."""

    plane: str
    """``inline`` or ``segments``."""
    folder: str | None = None
    """The folder of the segments, as this process would see it."""
    is_seen: bool = True
    """Whether this process sees the folder. If not, the numbers mean nothing."""
    why_unseen: str = ""
    """Why it does not see it, and what helps, or ''."""
    files: int = 0
    """The segments that hold samples, or held some a moment ago."""
    file_bytes: int = 0
    spare_files: int = 0
    """The files that wait for their next use."""
    spare_bytes: int = 0


def plane_of(stream: Stream) -> PayloadStorage:
    """Return the storage of a stream's payloads as this host sees it."""
    folder = segments_of(stream)
    if folder is None:
        return PayloadStorage(INLINE)
    if why := why_unseen(stream):
        return PayloadStorage("segments", str(folder.path), is_seen=False, why_unseen=why)
    files, spare = folder.names(), folder.spare()
    sizes, spare_sizes = ([stat.st_size for stat in of.values()] for of in (files, spare))
    return PayloadStorage(
        "segments", str(folder.path), files=len(files), file_bytes=sum(sizes), spare_files=len(spare),
        spare_bytes=sum(spare_sizes),
    )  # fmt: skip


def entry_fields(
    client: Client, stream: Stream, epoch: int, shard: int, entry_id: bytes, segments: SegmentReader | None
) -> Fields | None:
    """Return one entry by id with its payload, or None if it was removed. Raises BadEntry, SegmentGone."""
    found = client.xrange(stream.partition_of(shard).entries(epoch), entry_id, entry_id)
    if not found:
        return None
    return whole_fields(list(found[0][1].items()), stream.require_spec(), segments)


def entry_header(client: Client, stream: Stream, epoch: int, shard: int, entry_id: bytes) -> Header | None:
    """Return an entry's header, or None if it was removed. No payload is sent."""
    found = describe_entry(client, stream.partition_of(shard), epoch, entry_id)
    if not found or stream.spec is None:
        return None
    return parse_header(found[0], stream.spec, takes_refs=True)


def whole_fields(fields: Fields, spec: Spec, segments: SegmentReader | None) -> Fields:
    """Return an entry's fields with the payload that its header refers to. Raises BadEntry, SegmentGone."""
    if segments is None or len(fields) != 1:
        return fields
    header = parse_header(fields[0][1], spec, takes_refs=True)
    if header.ref is None:
        return fields
    found = segments.read(header.ref)
    return [fields[0], *((name, data) for (name, _), data in zip(header.fields(), found, strict=True))]


# --- the segments that a partition's entries are in -------------------------------------------------------------------


_FREE_SEGMENTS = load_script("free_segments")
_SEAL_SEGMENTS = load_script("seal_segments")

SEALED = "s:"


@dataclass(frozen=True, slots=True)
class RegisteredSegment:
    """One segment as the server knows it."""

    entries: int
    """The number of existing entries with a payload in it."""
    is_sealed: bool
    """Whether its writer declared that it gets no more entries."""


@readable(lambda client, partition, epoch: partition.segments(epoch))
def registered_segments(client: Client, partition: PartitionKeys, epoch: int) -> dict[str, RegisteredSegment]:
    """Return the segments of one epoch in one partition, by name."""
    fields = {name.decode(): int(value) for name, value in client.hgetall(partition.segments(epoch)).items()}
    return {
        name: RegisteredSegment(count, SEALED + name in fields)
        for name, count in fields.items()
        if not name.startswith(SEALED)
    }


def seal_segments(
    client: Client, partition: PartitionKeys, manifest: Manifest, names: Iterable[str], *, for_the_dead: bool = False
) -> None:
    """Declare that these segments get no more entries. A commit that names one is refused from then on.

    Nothing happens if the epoch was released. With ``for_the_dead`` another process declares it for a dead writer, also
    for segments without a commit: that writer's commit may still wait in a socket's buffer.
    """
    if wanted := list(names):
        keys, args = _keys_of(partition, manifest), [manifest.id, 2 if for_the_dead else 1, *wanted]
        run_script(client, _SEAL_SEGMENTS, keys, args)


def seal_command(partition: PartitionKeys, manifest: Manifest, names: Iterable[str]) -> Command:
    """Return the command by which their own writer seals segments. It is sent with others, and may be repeated."""
    args = ["2", *_keys_of(partition, manifest), manifest.id, "1", *names]
    return (b"EVAL", _SEAL_SEGMENTS.encode(), *[text.encode() for text in args])


def _keys_of(partition: PartitionKeys, manifest: Manifest) -> list[str]:
    return [partition.segments(manifest.epoch), partition.state(manifest.epoch)]


def free_segments(client: Client, partition: PartitionKeys, epoch: int, names: Iterable[str]) -> list[str]:
    """Remove sealed and empty segments from the registry, and return them: their files may be used again.

    Segments that were sealed for a dead writer and never registered are returned, too.
    """
    wanted = list(names)
    if not wanted:
        return []
    return [name.decode() for name in run_script(client, _FREE_SEGMENTS, [partition.segments(epoch)], wanted)]
