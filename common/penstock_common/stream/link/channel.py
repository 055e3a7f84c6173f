"""The data path's interface: pipelined commands out, replies in, stream entries straight into the caller's memory.

PlainChannel does it with redis-py's own connection alone: the fallback, and the oracle in tests. fast.py has the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from enum import Enum
from typing import Any, Final, Protocol, Self, TypeAlias, cast

from redis.exceptions import InvalidResponse, ResponseError

from penstock_common.errors import ServerUnavailable
from penstock_common.stream.link.failure import ReplyError, translate, translate_reply
from penstock_common.waiting import Notify, to_stderr
from penstock_common.watchdog import Request

__all__ = [
    "REPLY_TIMEOUT_S",
    "SKIP",
    "Channel",
    "Command",
    "EntrySink",
    "OwnsConnection",
    "PlainChannel",
    "Reply",
    "ReplyError",
    "Skip",
    "check_target",
]

Command: TypeAlias = Sequence[bytes | memoryview]
"""One command; arguments are bytes or C-contiguous memoryviews, which are sent without a copy where that pays."""

Reply: TypeAlias = "int | bytes | list[Reply] | ResponseError | None"
"""An error reply is a value, also inside the array of an EXEC."""

REPLY_TIMEOUT_S: Final = 30.0
"""Patience with a server that was asked something it answers at once; 6.2 sleeps through UNLINK and FLUSHALL."""


class Skip(Enum):
    """The type of SKIP."""

    SKIP = "skip"


SKIP: Final = Skip.SKIP
"""Answer of EntrySink.target: read this field's bytes and drop them."""


class EntrySink(Protocol):
    """Decides where each field of a received entry goes. It never raises: it records its failure and answers SKIP."""

    def begin(self, entry_id: bytes) -> None:
        """An entry starts."""

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """None: hand the field to `value`; else SKIP, or writable 'B' views adding up to `nbytes`, filled in order."""

    def value(self, name: bytes, data: bytes) -> None:
        """A field for which `target` answered None."""

    def end(self) -> None:
        """The entry is complete."""

    def missing(self, entry_id: bytes) -> None:
        """The id is listed but its fields are gone; the id is b"" where XCLAIM of Redis 6.2 does not say which."""


class Channel(Protocol):
    """One connection, used by one thread at a time. After any interruption it is broken, closed and never reused."""

    broken: bool

    @property
    def waited_s(self) -> float:
        """Seconds spent so far in waiting for bytes of the server."""

    def send(self, commands: Sequence[Command]) -> None:
        """Pipeline the commands; every byte is with the kernel on return, so the caller may reuse its buffers."""

    def read(self, timeout_s: float | None = REPLY_TIMEOUT_S) -> Reply:
        """The next reply in order; `timeout_s` bounds silence, so it must exceed a BLOCK. None waits for ever."""

    def read_entries(self, sink: EntrySink, timeout_s: float | None = REPLY_TIMEOUT_S) -> int:
        """The next reply, of XREADGROUP or XREAD (one key), XRANGE or XCLAIM, into `sink`; entries listed (nil: 0).

        An error reply raises ReplyError and leaves the channel whole; one that speaks of the server's state (a
        read-only replica, a script that keeps it busy) raises ServerUnavailable.
        """

    def hand_over(self) -> Channel:
        """The same connection for its next user, with nothing under way; this one is closed from now on."""

    def close(self) -> None:
        """Close the connection; again is harmless."""


class OwnsConnection:
    """What both channels do alike: a connection closed after any failure, and failures in Penstock's words."""

    def __init__(self, connection: Any, where: str, notify: Notify = to_stderr) -> None:
        self._connection, self._where = connection, where
        self._request = Request(where, notify)
        self.broken = False

    def hand_over(self) -> Self:
        """See Channel."""
        self._check()
        heir = copy(self)
        self.broken, self._connection = True, None
        return heir

    def close(self) -> None:
        """Close the connection; again is harmless."""
        self.broken = True
        if self._connection is not None:
            self._connection.disconnect()

    def _check(self) -> None:
        if self.broken:
            raise self._closed()

    def _closed(self) -> ServerUnavailable:
        return ServerUnavailable(f"this connection to Redis at {self._where} is closed: open another")

    def _fail(self, error: BaseException) -> None:
        """Close, and raise what a user can act on; returns where `error` itself says it best."""
        closed_meanwhile = self.broken  # by another thread, which is how a wait is ended; errors then vary
        self.close()
        if closed_meanwhile and isinstance(error, Exception):
            raise self._closed() from error
        failure = translate(error, self._where)
        if failure is not None:
            raise failure from error


class PlainChannel(OwnsConnection):
    """A channel over redis-py's own packing and parsing; received fields are copied into the sink's views."""

    waited_s = 0.0
    """See Channel; redis-py's parsing included."""

    def send(self, commands: Sequence[Command]) -> None:
        """Pack as redis-py packs (with hiredis: copies); see Channel."""
        self._check()
        try:
            self._request.begin()
            self._connection._sock.settimeout(REPLY_TIMEOUT_S)
            packed = self._connection.pack_commands([[_flat(part) for part in command] for command in commands])
            self._connection.send_packed_command(packed, check_health=False)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._request.end()

    def read(self, timeout_s: float | None = REPLY_TIMEOUT_S) -> Reply:
        """The next reply; see Channel."""
        self._check()
        began = time.perf_counter()
        try:
            self._request.begin()
            self._connection._sock.settimeout(timeout_s)
            reply = cast(Reply, self._connection.read_response(disable_decoding=True))
            self._request.answered()
            return reply
        except ResponseError as error:
            return error
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._request.end()
            self.waited_s += time.perf_counter() - began

    def read_entries(self, sink: EntrySink, timeout_s: float | None = REPLY_TIMEOUT_S) -> int:
        """Read it whole, then copy; see Channel."""
        reply = self.read(timeout_s)
        if isinstance(reply, ResponseError):
            raise translate_reply(reply, self._where) from reply
        try:
            entries = _entries(reply)
            for entry in entries:
                _deliver(entry, sink)
        except BaseException as error:
            self._fail(error)
            raise
        return len(entries)


def _flat(part: bytes | memoryview) -> bytes | memoryview:
    return part.cast("B") if isinstance(part, memoryview) and part.format != "B" else part


def _entries(reply: Reply) -> list[Any]:
    """The entries of an XRANGE or of a one-key XREAD; both may be one pair, but only XREAD's second holds lists."""
    if reply is None:
        return []
    if not isinstance(reply, list):
        raise InvalidResponse(f"expected stream entries, found {reply!r:.80}")
    match reply:
        case [[bytes(), [] | [list(), *_] as entries]]:
            return entries
    return reply


def _deliver(entry: Any, sink: EntrySink) -> None:
    match entry:
        case None:
            sink.missing(b"")
        case [bytes() as entry_id, None]:
            sink.missing(entry_id)
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


def check_target(views: Sequence[memoryview], nbytes: int) -> None:
    """A sink that answers views of another size would corrupt its neighbours: refuse before a byte is written."""
    found = views[0].nbytes if len(views) == 1 else sum(view.nbytes for view in views)
    if found != nbytes:
        raise ValueError(f"the sink gave views of {found} bytes for a field of {nbytes}")
