"""Parts of many shards' indexes in one round trip: the records that cover given offsets, and how far shards are.

A record's id is the offset after its last, so the one that covers an offset is found without what lies before it.
One shard from some offset on, in order, is ``entries``'s (`index_records`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock_common.stream.entries import Record, index_record, index_records
from penstock_common.stream.link.commands import Client
from penstock_common.stream.streams import Stream


class Want(NamedTuple):
    """Records of one shard."""

    shard: int
    after: int
    """The first of them is the one that covers this offset, or the next there is."""
    most: int
    """So many of them; of a shard in which something was repaired all that follow."""


def index_pages(
    client: Client, stream: Stream, epoch: int, wants: Sequence[Want], follows: int | None = None
) -> tuple[list[list[Record]], int]:
    """For each want its records, in order of offset; and how far the shard is that somebody ``follows``."""
    shards = sorted({want.shard for want in wants})
    with client.pipeline(transaction=False) as pipe:
        for shard in shards:
            pipe.xrange(stream.partition_of(shard).repairs(epoch, shard), count=1)
        for shard, after, most in wants:
            key = stream.partition_of(shard).index(epoch, shard)
            pipe.xrange(key, min=f"({after}-0" if after else "-", count=most)
        if follows is not None:
            pipe.xrevrange(stream.partition_of(follows).index(epoch, follows), count=1)
        replies: list[list[Any]] = pipe.execute()
    repaired = {shard for shard, found in zip(shards, replies, strict=False) if found}
    found = replies[len(shards) :]
    pages = [
        [index_record(*each) for each in page]
        if want.shard not in repaired
        else list(index_records(client, stream.partition_of(want.shard), epoch, want.shard, want.after))
        for want, page in zip(wants, found, strict=False)
    ]
    return pages, _end(found[-1]) if follows is not None else 0


def shard_ends(client: Client, stream: Stream, epoch: int, shards: Sequence[int]) -> list[int]:
    """How many offsets of each shard are committed, in whichever partitions they lie."""
    with client.pipeline(transaction=False) as pipe:
        for shard in shards:
            pipe.xrevrange(stream.partition_of(shard).index(epoch, shard), count=1)
        replies: list[list[Any]] = pipe.execute() if shards else []
    return [_end(found) for found in replies]


def _end(newest: list[Any]) -> int:
    return index_record(*newest[0]).end if newest else 0
