"""The payloads of one shard, inline or in segments: the size of a segment, and when the server learns that it is full.

``segments.writer`` writes them, and `cleaner` says which may be used again.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BudgetRefused, PenstockError, SegmentsUnseen
from penstock_common.printable import readable_bytes
from penstock_common.segments.folder import parse_payload
from penstock_common.segments.writer import SegmentWriter
from penstock_common.server.channel import Command, Reply
from penstock_common.settings import Settings
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.payloads import seal_command, seal_segments, segments_of
from penstock_common.stream.servers.durability import Durability
from penstock_common.stream.streams import DEFAULT_BUDGET_BYTES, Stream, find_stream, read_counters, require_there
from penstock_common.wire.block import Block, sizes_of
from penstock_common.wire.codec import Fields, encode, meta_bytes, stored_bytes
from penstock_common.wire.header import FILE_PAGE, parse_header
from penstock_common.wire.spec import Spec
from penstock_producer.write.reserve import memory_for
from penstock_producer.write.target import ShardTarget

SEGMENT_BYTES = 64 << 20
"""The usual size. It is so large that making and sealing a segment costs nothing per byte, and so small that a budget
holds many."""
LARGE_BYTES = 32 << 20
"""A block of this size has a file of its own. A budget holds only a few such files. If none is free in time, a new one
is made, and allocating its pages takes longer than everything else."""
RECORD_BYTES, HEAD_BYTES = 2048, FILE_PAGE
"""Bytes reserved in a segment for the start of the file, and for each record without its payload. Only unusual specs
need more.
"""
HOLES_BYTES = 1024
"""Bytes reserved for the holes in the header of a block that is made in place. A block with more is copied."""
BUDGET_SHARE = 1 / 16
"""The share of a partition's budget that a segment should not exceed, because one unacknowledged sample keeps all of it
in use."""


def prepare_folder(client: Client, stream: Stream) -> None:
    """Make a stream's folder before its first epoch; later, require that this host sees it.

    A host that does not see the folder would make another one, whose payloads no reader finds. Raises SegmentsUnseen.
    """
    folder = segments_of(stream)
    if folder is not None and read_counters(client, stream)[0]:
        folder.require_own()
    elif folder is not None:
        folder.make()


def require_capacity(client: Client, name: str, payload: str | None, budget_bytes: int | None) -> None:
    """Require that a stream's folder could hold a new budget, before the stream is made or changed. None is its present
    budget.

    Raises BudgetRefused if the whole file system is smaller, and BadOption.
    """
    folder, stream = parse_payload(payload or "inline"), find_stream(client, name)
    if stream is not None:
        folder, budget_bytes = parse_payload(stream.payload), budget_bytes or stream.budget_bytes
    if folder is None:
        return
    budget_bytes = budget_bytes or DEFAULT_BUDGET_BYTES
    root = Settings.from_environment().segments or folder
    total = _disk_of(root)[0]
    if total < budget_bytes:
        raise BudgetRefused(
            f"budget_bytes is {readable_bytes(budget_bytes)}, and the file system of {root} has "
            f"{readable_bytes(total)} in all: give a smaller one, or another folder; a container gets more of /dev/shm "
            "with --shm-size"
        )


def default_capacity(payload: str | None) -> int | None:
    """Return half of what is free where a new stream keeps its payloads, or None if they are inline."""
    folder = parse_payload(payload or "inline")
    return None if folder is None else _disk_of(Settings.from_environment().segments or folder)[1] // 2


def _disk_of(root: Path) -> tuple[int, int]:
    """Return the bytes of a file system in all, and those that are free."""
    found = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists()))
    return found.total, found.free


def open_segment_writer(target: ShardTarget) -> SegmentWriter | None:
    """Return a segment writer for the blocks of one shard; None if payloads are inline.

    Raises:
        SegmentsUnseen: This host does not see the stream's folder.
        StreamDeleted: The stream is gone.
    """
    stream = target.stream
    folder = segments_of(stream)
    if folder is None:
        return None
    try:
        folder.require_own()
    except SegmentsUnseen:
        require_there(target.client, stream)
        raise
    return SegmentWriter(
        folder, (stream.name, stream.id), stream.require_spec(), target.epoch, target.partition.number,
        segment_bytes=segment_bytes(stream, target.manifest, target.number),
        is_synced=Durability.parse(stream.durability).fsync,
    )  # fmt: skip


def segment_bytes(stream: Stream, manifest: Manifest, shard: int) -> int:
    """Return the size of a new segment.

    A small shard takes no more than it needs, and a large one turns over within the budget.
    """
    known = [tensor.sample_bytes for tensor in stream.spec or () if not tensor.is_ragged]
    record = max(stream.block_bytes, sum(known)) + RECORD_BYTES
    # whole blocks: space at the end of a file that no block fits into is lost
    most_bytes = min(SEGMENT_BYTES, int(stream.partition_budget * BUDGET_SHARE)) - HEAD_BYTES
    # at least two blocks, unless they are so large that a file for each costs nothing: it is free again sooner
    most = max(2 if record < LARGE_BYTES else 1, most_bytes // record) * record + HEAD_BYTES
    if manifest.sizes is None or stream.spec is None or any(tensor.is_ragged for tensor in stream.spec):
        return most
    payload = manifest.shard_size(shard) * sum(known)
    entries = payload // max(1, stream.block_bytes) + 2
    whole = payload + entries * RECORD_BYTES
    if whole + HEAD_BYTES <= most:
        return whole + HEAD_BYTES
    # files of equal sizes, of whole blocks: the last of full ones would be nearly empty for some shards
    files = -(-whole // (most - HEAD_BYTES))
    return min(most, -(-whole // (files * record)) * record + HEAD_BYTES)


class FolderFull(PenstockError):
    """A disk takes no more segments at this moment."""


class ShardPayloads:
    """The payloads of one shard: encoded for its entries, and put into segments where the stream has them.

    It tells the server which segments are full. It names only segments without an entry under way, because a later
    entry would be lost.
    """

    def __init__(self, target: ShardTarget, *, checksum: bool) -> None:
        """Make no file yet. Raises what `open_segment_writer` raises."""
        self._target, self._checksum = target, checksum
        self._segment_writer = open_segment_writer(target)
        self._in_place = None if target.stream.compression else self._segment_writer
        """The segment writer, if blocks may be made in its memory."""
        self._newest: tuple[Block, Fields, str] | None = None
        """The block that was encoded last, its entry's fields, and the segment that has its payload."""

    def place(self, count: int) -> NDArray[np.uint8] | None:
        """Return memory of a segment for at most ``count`` samples, or None if the block is better made elsewhere."""
        if self._in_place is None:
            return None
        spec = self._in_place.spec
        try:
            return self._in_place.place(meta_bytes(spec, count) + HOLES_BYTES, sizes_of(spec, count))
        except OSError:  # committing the block meets the same error, and reports it
            return None

    def reserve(self, spec: Spec, count: int) -> NDArray[np.uint8]:
        """Return memory for the columns of ``count`` samples, of a segment if there is one. Raises FolderFull."""
        if self._in_place is None:
            return memory_for(spec, count)
        try:
            return self._in_place.reserve(meta_bytes(spec, count), sizes_of(spec, count))
        except OSError as error:
            raise self._refused(self._in_place, error) from error

    def drop_reserved(self, block: Block) -> None:
        """Drop a reserved block. Its place in the segment stays taken, and no index names it."""
        if self._in_place is not None:
            self._in_place.append(self._encoded(block, checksum=False))

    def fields_of(self, block: Block) -> Fields:
        """Return the fields of a block's entry. With segments, the payload is put into one first. Raises FolderFull."""
        if self._newest is not None and self._newest[0] is block:  # it is sent again
            return self._newest[1]
        self._newest = None
        if not block.count:
            return []
        fields, segment = self._encoded(block, checksum=self._checksum), ""
        if self._segment_writer is not None:
            try:
                fields, segment = self._segment_writer.append(fields)
            except OSError as error:
                raise self._refused(self._segment_writer, error) from error
            self._newest = block, fields, segment
        return fields

    def segment_of(self, block: Block) -> str:
        """Return the segment that has the payload of the block that was encoded last, or ''."""
        return self._newest[2] if self._newest is not None and self._newest[0] is block else ""

    def nbytes_of(self, block: Block, fields: Fields) -> int:
        """Return the payload bytes of a block as they are stored, in its entry's ``fields`` or in a segment."""
        stream = self._target.stream
        if not fields or not stream.compression:
            return block.nbytes
        header = parse_header(fields[0][1], stream.require_spec(), takes_refs=True)
        return stored_bytes(header, header.ref.sizes if header.ref else [len(value) for _, value in fields[1:]])

    @contextmanager
    def keeping_newest(self) -> Iterator[None]:
        """Keep the encoded form of the newest block while other blocks are sent."""
        newest = self._newest
        yield
        self._newest = newest

    def leave_segment(self) -> None:
        """Put uncommitted blocks into another segment, because another process declared this writer dead."""
        self._newest = None
        if self._segment_writer is not None:
            self._segment_writer.leave()

    def close(self) -> None:
        """End the segment under way. A block in its memory would keep the file locked."""
        self._newest = None
        if self._segment_writer is not None:
            self._segment_writer.close()

    def seal_behind(self, *under_way: str) -> tuple[list[str], list[Command]]:
        """Return the names of full segments, and the command to send behind a block.

        ``under_way`` names segments of blocks that are not known to be committed. The answer goes to `sealed`.
        """
        full = [] if self._segment_writer is None else self._segment_writer.full
        names = [name for name in full if name not in under_way]
        return names, [seal_command(self._target.partition, self._target.manifest, names)] if names else []

    def sealed(self, names: list[str], reply: Reply) -> None:
        """Take the answer. What the server refused, and what a broken connection took, is sent again."""
        if self._segment_writer is not None and type(reply) is int:
            self._segment_writer.forget_full(names)

    def seal_now(self) -> None:
        """Seal all full segments. No block may be under way."""
        if self._segment_writer is not None and self._segment_writer.full:
            at = self._target.client, self._target.partition, self._target.manifest
            seal_segments(*at, self._segment_writer.full)
            self._segment_writer.full.clear()

    def _encoded(self, block: Block, *, checksum: bool) -> Fields:
        stream = self._target.stream
        return encode(
            block, stream=stream.id, epoch=self._target.epoch, shard=self._target.number, checksum=checksum,
            compression=stream.compression,
        )  # fmt: skip

    def _refused(self, segment_writer: SegmentWriter, error: OSError) -> PenstockError:
        """Return the error for a file that cannot be made or enlarged."""
        folder = segment_writer.folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return FolderFull(str(folder.path))
        require_there(self._target.client, self._target.stream)  # deleted, it has no folder any more
        if error.errno == errno.ENOENT and not os.path.lexists(folder.path):
            return SegmentsUnseen(
                f"{folder.path} is gone, with the payloads in it: another program removed it, or its disk is no longer "
                f"mounted. Mount it again, or run `penstock delete {self._target.stream.name}` and write the stream "
                "again"
            )
        try:
            folder.require_own()
        except SegmentsUnseen as why:
            return why
        advice = "look whether its disk works and takes writes"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            advice = "raise the limit of open files (ulimit -n)"
        return SegmentsUnseen(f"{folder.path} takes no more segments: {error.strerror or error}: {advice}")
