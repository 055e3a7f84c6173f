"""Parts of many shards' indexes in one round trip: the records that cover given offsets, and how far shards are.

A record's id is the offset after its last, so the one that covers an offset is found without the records before it.
`entries.index_records` reads one shard in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock_common.server.channel import Channel, Command
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import Record, index_record, index_records, raise_errors
from penstock_common.stream.streams import Stream


class Want(NamedTuple):
    """The records of one shard that a reader wants."""

    shard: int
    after: int
    """The first of them covers this offset, or is the next one."""
    most: int
    """The number of records. All that follow, if something was repaired in the shard."""


class Pages(NamedTuple):
    """The records and ends of one answer."""

    records: list[list[Record]]
    """The records of each want, in order of offset."""
    ends: list[int]
    """The committed offsets of the awaited shard, then of each followed one. 0: nothing new."""


class Indexes:
    """The indexes of one epoch."""

    def __init__(self, client: Client, stream: Stream, epoch: int) -> None:
        self._client, self._stream, self._epoch = client, stream, epoch

    def read(self, wants: Sequence[Want], follows: Sequence[int] = ()) -> Pages:
        """Return the present records, and how far the shards are that the reader ``follows``."""
        commands = self._commands(wants, follows)
        with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return self._pages(wants, follows, pipe.execute() if commands else [])

    def await_more(
        self, channel: Channel, shard: int, after: int, block_ms: int, wants: Sequence[Want], follows: Sequence[int]
    ) -> Pages:
        """Return the same once a record of a shard ends beyond ``after``, or after ``block_ms`` (> 0), on a quiet
        channel.
        """
        key = self._stream.partition_of(shard).index(self._epoch, shard).encode()
        awaited = (b"XREAD", b"COUNT", b"1", b"BLOCK", b"%d" % block_ms, b"STREAMS", key, b"%d-0" % after)
        commands = [awaited, *self._commands(wants, follows)]  # answered together: a client that waits waits with all
        channel.send(commands)
        replies: list[Any] = [channel.read() for _ in commands]
        raise_errors(replies, self._client, [part for command in commands for part in command if type(part) is bytes])
        first = replies.pop(0)
        found = self._pages(wants, follows, replies)
        return Pages(found.records, [_end(first[0][1], key.decode()) if first else 0, *found.ends])

    def _commands(self, wants: Sequence[Want], follows: Sequence[int]) -> list[Command]:
        part, epoch = self._stream.partition_of, self._epoch
        repairs = [
            (b"EXISTS", *[part(s).repairs(epoch, s).encode() for s in shards]) for shards in self._together(wants)
        ]
        pages = [
            (b"XRANGE", part(s).index(epoch, s).encode(), b"(%d-0" % at if at else b"-", b"+", b"COUNT", b"%d" % most)
            for s, at, most in wants
        ]
        ends = [(b"XREVRANGE", part(s).index(epoch, s).encode(), b"+", b"-", b"COUNT", b"1") for s in follows]
        return [*repairs, *pages, *ends]

    def _pages(self, wants: Sequence[Want], follows: Sequence[int], replies: list[Any]) -> Pages:
        together = self._together(wants)
        repaired = {shard for shards, count in zip(together, replies, strict=False) if count for shard in shards}
        found, ends = replies[len(together) :][: len(wants)], replies[len(together) + len(wants) :]
        records = [
            [_record(one, self._key(want.shard)) for one in page]
            if want.shard not in repaired
            else list(
                index_records(self._client, self._stream.partition_of(want.shard), self._epoch, want.shard, want.after)
            )
            for want, page in zip(wants, found, strict=True)
        ]
        return Pages(records, [_end(newest, self._key(shard)) for newest, shard in zip(ends, follows, strict=True)])

    def _key(self, shard: int) -> str:
        return self._stream.partition_of(shard).index(self._epoch, shard)

    def _together(self, wants: Sequence[Want]) -> list[list[int]]:
        """Return the shards by partition: one request asks for all of them whether something was repaired."""
        found: dict[int, list[int]] = {}
        for shard in sorted({want.shard for want in wants}):
            found.setdefault(self._stream.partition_of(shard).number, []).append(shard)
        return list(found.values())


def _record(one: Any, key: str) -> Record:
    """Return a record that the client has parsed, or that came through a channel."""
    record_id, fields = one
    named = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2]))  # noqa: B905
    return index_record(record_id, named, key)


def _end(records: list[Any], key: str) -> int:
    return _record(records[0], key).end if records else 0
