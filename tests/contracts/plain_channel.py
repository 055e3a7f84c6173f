"""PlainChannel moves data with redis-py's own packing and parsing: the oracle that Channel is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import redis
from redis.exceptions import InvalidResponse, ResponseError

from penstock_common.server.channel import REPLY_TIMEOUT_S, SKIP, Channel, Command, EntrySink, Reply
from penstock_common.server.connection import _dedicated
from penstock_common.server.error_translation import address, translate_reply
from penstock_common.server.resp import check_target


class PlainChannel(Channel):
    """A channel that sends and receives by redis-py's calls alone, and copies received fields into the sink's views."""

    def send(self, commands: Sequence[Command]) -> None:
        """Pack as redis-py packs; see Channel."""
        self._check()
        try:
            self._connection._sock.settimeout(REPLY_TIMEOUT_S)
            packed = self._connection.pack_commands([[_flat(part) for part in command] for command in commands])
            self._connection.send_packed_command(packed, check_health=False)
        except BaseException as error:
            self._fail(error)
            raise

    def read(self, timeout_s: float | None = REPLY_TIMEOUT_S) -> Reply:
        """Return the next reply, parsed by redis-py; see Channel."""
        self._check()
        try:
            self._connection._sock.settimeout(timeout_s)
            return cast(Reply, self._connection.read_response(disable_decoding=True))
        except ResponseError as error:
            return error
        except BaseException as error:
            self._fail(error)
            raise

    def read_entries(self, sink: EntrySink, timeout_s: float | None = REPLY_TIMEOUT_S) -> int:
        """Read the whole reply, then copy; see Channel."""
        reply = self.read(timeout_s)
        if isinstance(reply, ResponseError):
            raise translate_reply(reply, self._where) from reply
        try:
            entries = entries_of(reply)
            for entry in entries:
                deliver(entry, sink)
        except BaseException as error:
            self._fail(error)
            raise
        return len(entries)


def open_plain_channel(client: redis.Redis, connection: Any = None) -> PlainChannel:
    """Return a PlainChannel to a client's server, over a connection that is prepared but not yet made, if given."""
    connection = connection or _dedicated(client)
    connection.connect()
    return PlainChannel(connection, address(client))


def entries_of(reply: Reply) -> list[Any]:
    """Return the entries of an XRANGE or of a one-key XREAD.

    Both may be one pair, but only in XREAD's does the second part hold lists.
    """
    if reply is None:
        return []
    if not isinstance(reply, list):
        raise InvalidResponse(f"expected stream entries, found {reply!r:.80}")
    match reply:
        case [[bytes(), [] | [list(), *_] as entries]]:
            return entries
    return reply


def deliver(entry: Any, sink: EntrySink) -> None:
    """Give a sink one parsed entry as a channel does."""
    match entry:
        case [bytes() as entry_id, [*fields]] if len(fields) % 2 == 0 and all(type(one) is bytes for one in fields):
            sink.begin(entry_id)
            for name, data in zip(fields[::2], fields[1::2], strict=True):
                _place(name, data, sink)
            sink.end()
        case _:
            raise InvalidResponse(f"expected a stream entry, found {entry!r:.80}")


def _place(name: bytes, data: bytes, sink: EntrySink) -> None:
    target = sink.target(name, len(data))
    if target is None:
        sink.value(name, data)
    elif target is not SKIP:
        check_target(target, len(data))
        start = 0
        for view in target:
            view[:] = data[start : start + len(view)]
            start += len(view)


def _flat(part: bytes | memoryview) -> bytes | memoryview:
    return part.cast("B") if isinstance(part, memoryview) and part.format != "B" else part
