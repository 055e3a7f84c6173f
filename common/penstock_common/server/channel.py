"""The data path: pipelined commands out, replies in, stream entries straight into the caller's memory.

redis-py connects and logs in. From then on Channel drives the connection's socket itself, through a PlainSocket or a
TlsSocket. They limit the server's silence and measure the time spent in waiting. A RoutedChannel
leads to a cluster: each command goes to the server that holds its key.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import redis
from redis.exceptions import ResponseError

from penstock_common.errors import ServerUnavailable, ServerUnsuitable
from penstock_common.server.error_translation import ReplyError, server_at, translate, translate_reply
from penstock_common.server.resp import (
    SKIP,
    Command,
    EntrySink,
    Part,
    ReceivingSocket,
    Reply,
    RespReader,
    Skip,
    pack,
)
from penstock_common.server.slots import Key, key_of
from penstock_common.stall_detector import PendingRequest
from penstock_common.waiting import Notify, to_stderr

if TYPE_CHECKING:
    from penstock_common.server.client import ControlClient

__all__ = ["REPLY_TIMEOUT_S", "SKIP", "Channel", "Command", "EntrySink", "Reply", "ReplyError", "RoutedChannel", "Skip"]

REPLY_TIMEOUT_S: Final = 30.0
"""The longest wait for an answer that needs no time. Redis 6.2 is silent during a long UNLINK or FLUSHALL."""

PIECE_BYTES: Final = 16 << 20
"""The most bytes that one receive waits for. On a slow network a large payload must not count as silence."""

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)

KNOWN_REDIS_PY = "redis>=5.3,<9"
"""The versions of redis-py whose connections a channel can drive, the same as in pyproject.toml."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0)
"""Asks whether the other side has closed. Where the system has no such question, only a reset is seen."""


class Channel:
    """One connection, used by one thread at a time. After any interruption it is broken, closed and never reused."""

    _sent_bytes = 0
    """The size of the last request."""

    def __init__(self, connection: Any, where: str, notify: Notify = to_stderr) -> None:
        """Take over a connection of redis-py that is connected and logged in; raises ServerUnsuitable."""
        self._connection, self._where = connection, where
        self._descriptor = sock = _socket_of(connection)
        self._socket: SendingSocket = TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else PlainSocket(sock)
        self._request = PendingRequest(where, notify, heard=partial(getattr, self._socket, "heard_s"))
        self._reader = RespReader(self._socket, connection._parser.parse_error)
        self.broken = False

    @property
    def where(self) -> str:
        """Return the address of the server, without its password."""
        return self._where

    @property
    def waited_s(self) -> float:
        """Return the total seconds spent in waiting for bytes of the server."""
        return self._socket.waited_s

    @property
    def is_cut(self) -> bool:
        """Return whether the connection is closed, here or by the server, without a request to the server."""
        if self.broken or self._descriptor.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._descriptor, _HUNG_UP)
        return bool(poll.poll(0))

    def send(self, commands: Sequence[Command]) -> None:
        """Pipeline the commands. Every byte is with the kernel on return, so the caller may reuse its buffers."""
        self._check()
        try:
            self._request.begin()
            parts = pack(commands)
            self._sent_bytes = sum(map(len, parts))
            self._socket.send_all(parts)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._request.marks.discard(self._request)
            self._request.end()

    def read(self, timeout_s: float | None = REPLY_TIMEOUT_S) -> Reply:
        """Return the next reply in order.

        ``timeout_s`` bounds the server's silence, so it must exceed a BLOCK. None waits for ever.
        """
        return self.read_all(1, timeout_s)[0]

    def read_all(self, count: int, timeout_s: float | None = REPLY_TIMEOUT_S) -> list[Reply]:
        """Return the next ``count`` replies in order. See `read`."""
        self._check()
        try:
            self._request.begin()
            self._socket.set_timeout(timeout_s)
            replies = [self._reader.reply() for _ in range(count)]
            self._request.answered()
            return replies
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._request.marks.discard(self._request)
            self._request.end()

    def read_entries(self, sink: EntrySink, timeout_s: float | None = REPLY_TIMEOUT_S) -> int:
        """Receive the next reply into ``sink`` and return how many entries it listed, 0 for nil.

        It must be the reply of XREADGROUP or XREAD of one key, or of XRANGE. An error reply raises ReplyError
        and leaves the channel whole. One that speaks of the server's state (a read-only replica, a script that keeps it
        busy) raises ServerUnavailable.
        """
        self._check()
        try:
            self._request.begin()
            self._socket.set_timeout(timeout_s)
            found = self._reader.entries(sink)
            self._request.answered()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._request.marks.discard(self._request)
            self._request.end()
        if isinstance(found, ResponseError):
            raise translate_reply(found, self._where) from found
        return found

    def hand_over(self) -> Self:
        """Return the same connection for its next user, with nothing under way; this one is closed from now on."""
        self._check()
        heir = copy(self)
        self.broken, self._connection = True, None
        return heir

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self.broken = True
        if self._connection is not None:
            self._connection.disconnect()

    def _check(self) -> None:
        if self.broken:
            raise self._closed()

    def _closed(self) -> ServerUnavailable:
        return ServerUnavailable(f"this connection to {server_at(self._where)} is closed: open another")

    def _fail(self, error: BaseException) -> None:
        """Close the connection, and raise an error that a user can act on.

        Returns if `error` itself describes the failure best.
        """
        closed_meanwhile = self.broken  # by another thread, which ends a wait in this way; errors then vary
        self.close()
        if closed_meanwhile and isinstance(error, Exception):
            raise self._closed() from error
        failure = translate(error, self._where, self._sent_bytes)
        if failure is not None:
            raise failure from error


def _socket_of(connection: Any) -> socket.socket:
    """Return the socket of a connection that redis-py has made. Raises ServerUnsuitable for an unknown redis-py.

    A channel relies on three facts: ``_sock`` is the socket itself, ``_parser.parse_error`` makes exceptions, and no
    reply is half read.
    """
    try:
        sock = connection._sock
        if not isinstance(sock, socket.socket):
            raise _unknown("its connection has no socket")
        if not isinstance(connection._parser.parse_error("ERR probe"), ResponseError):
            raise _unknown("its parser makes no ResponseError")
        if connection.can_read(0):
            raise _unknown("it holds unread replies")
    except (AttributeError, TypeError) as error:
        raise _unknown(str(error)) from error
    return sock


def _unknown(reason: str) -> ServerUnsuitable:
    return ServerUnsuitable(
        f"redis-py {redis.__version__} keeps its connections in a way that Penstock does not know ({reason}): "
        f"pip install '{KNOWN_REDIS_PY}'"
    )


# --- a channel to a cluster -------------------------------------------------------------------------------------------


class RoutedChannel(Channel):
    """Connections to the servers of a cluster, used by one thread at a time.

    A command without a key goes where the command before it went. If a connection breaks, the replies before the ones
    that are due on it can still be read. Then all are closed.
    """

    def __init__(self, client: ControlClient, open_one: Callable[[ControlClient, Key], Channel]) -> None:
        """Open no connection yet; ``open_one`` opens the one that leads to a key."""
        self._client, self._open_one, self._where = client, open_one, client.where
        self._channels: dict[str, Channel] = {}
        """Address of a server -> the connection to it."""
        self._due: deque[Channel | ServerUnavailable] = deque()
        """The connections on which replies are due, in order, or why there is none."""
        self.broken = False

    @property
    def waited_s(self) -> float:
        """See Channel."""
        return sum(channel.waited_s for channel in self._channels.values())

    @property
    def is_cut(self) -> bool:
        """See Channel."""
        return self.broken or any(channel.is_cut for channel in self._channels.values())

    def send(self, commands: Sequence[Command]) -> None:
        """See Channel."""
        self._check()
        chosen: list[Channel | ServerUnavailable] = []
        routed: dict[Channel, list[Command]] = {}
        failed: dict[Channel | str, ServerUnavailable] = {}
        try:
            for command in commands:
                key = key_of(command)
                if key is not None or not chosen:
                    chosen.append(self._leading_to(key, failed))
                else:
                    chosen.append(chosen[-1])
                if isinstance(channel := chosen[-1], Channel):
                    routed.setdefault(channel, []).append(command)
            for there, group in routed.items():
                try:
                    there.send(group)
                except ServerUnavailable as error:
                    failed[there] = error
            if failed and all(one in failed for one in routed):  # no reply is due
                raise next(iter(failed.values()))
        except BaseException:
            self.close()
            raise
        self._due.extend(failed.get(one, one) if isinstance(one, Channel) else one for one in chosen)

    def read_all(self, count: int, timeout_s: float | None = REPLY_TIMEOUT_S) -> list[Reply]:
        """See Channel."""
        self._check()
        try:
            return [self._next().read(timeout_s) for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def read_entries(self, sink: EntrySink, timeout_s: float | None = REPLY_TIMEOUT_S) -> int:
        """See Channel."""
        self._check()
        channel = self._next()
        try:
            return channel.read_entries(sink, timeout_s)
        finally:
            if channel.broken:
                self.close()

    def close(self) -> None:
        """See Channel."""
        self.broken = True
        for channel in self._channels.values():
            channel.close()

    def _next(self) -> Channel:
        """Return the connection on which the next reply is due. Raises why there is none."""
        due = self._due.popleft()
        if isinstance(due, ServerUnavailable):
            self.close()
            raise due
        return due

    def _leading_to(self, key: Key, failed: dict[Channel | str, ServerUnavailable]) -> Channel | ServerUnavailable:
        """Return the connection that leads to a key, or why it cannot be made, which ``failed`` learns."""
        where = self._client.node_of(key).where
        if where in failed:
            return failed[where]
        if where not in self._channels:
            try:
                channel = self._open_one(self._client, key)
            except ServerUnavailable as error:
                return failed.setdefault(where, error)
            return self._channels.setdefault(channel.where, channel)
        return self._channels[where]


# --- sockets --------------------------------------------------------------------------------------------------------


class SendingSocket(ReceivingSocket):
    """A blocking socket with a bound on silence, for both directions."""

    SILENCE: type[OSError]
    """The error by which a receive ends after silence."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._timeout_s: float | None = -1.0
        """The bound on silence; -1 before the first `set_timeout`."""
        self.waited_s = 0.0
        """Seconds spent in receiving, measured around system calls. One call may bring many small entries."""
        self.heard_s = 0.0
        """When the last receive ended, by `time.monotonic`."""

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound the wait of each later receive for its first byte. None waits for ever."""

    def send_all(self, parts: Sequence[Part]) -> None:
        """Hand every byte to the kernel."""

    def receive(self, view: memoryview) -> int:
        """Receive what one call brings. For TLS this is what is left of one record."""
        began = time.monotonic()
        try:
            return self._sock.recv_into(view) or _ended()
        except self.SILENCE:
            raise _silent(self._timeout_s) from None
        finally:
            self.heard_s = time.monotonic()
            self.waited_s += self.heard_s - began


class PlainSocket(SendingSocket):
    """A TCP or unix socket. The kernel keeps the time, since Python's own timeouts cost a poll before every call."""

    SILENCE = BlockingIOError

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(REPLY_TIMEOUT_S))

    def set_timeout(self, timeout_s: float | None) -> None:
        """See SendingSocket."""
        if timeout_s != self._timeout_s:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
            self._timeout_s = timeout_s

    def receive_all(self, views: Sequence[memoryview]) -> None:
        """Fill all views; the kernel wakes this thread once they are full."""
        began = time.monotonic()
        try:
            if len(views) == 1:
                self._fill(views[0])
            else:
                self._scatter(list(views))
        except BlockingIOError:
            raise _silent(self._timeout_s) from None
        finally:
            self.heard_s = time.monotonic()
            self.waited_s += self.heard_s - began

    def _fill(self, view: memoryview) -> None:
        while got := self._sock.recv_into(view, min(len(view), PIECE_BYTES), socket.MSG_WAITALL) or _ended():
            if got == len(view):
                return
            self.heard_s = time.monotonic()
            view = view[got:]

    def _scatter(self, views: list[memoryview]) -> None:
        while views:
            got = self._sock.recvmsg_into(views[:_IOV_MAX], 0, socket.MSG_WAITALL)[0] or _ended()
            views = _after(views, got)

    def send_all(self, parts: Sequence[Part]) -> None:
        """Send with one sendmsg for a thousand parts, as long as the server keeps reading."""
        rest: Sequence[Part] = parts
        try:
            while rest:
                rest = _after(rest, self._sock.sendmsg(rest[:_IOV_MAX]))
        except BlockingIOError:
            raise TimeoutError(f"took no bytes for {REPLY_TIMEOUT_S:g} s") from None


class TlsSocket(SendingSocket):
    """A TLS socket. It has neither sendmsg nor recvmsg_into, so it works record by record, but still in place."""

    SILENCE = TimeoutError

    def set_timeout(self, timeout_s: float | None) -> None:
        """See SendingSocket."""
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def receive_all(self, views: Sequence[memoryview]) -> None:
        """Fill all views record by record."""
        for view in views:
            done = 0
            while done < len(view):
                done += self.receive(view[done:])

    def send_all(self, parts: Sequence[Part]) -> None:
        """Send part by part, since joining the parts would copy the payloads."""
        self._sock.settimeout(REPLY_TIMEOUT_S)
        for part in parts:
            self._sock.sendall(part)


def _after(parts: Sequence[Part], done: int) -> list[memoryview]:
    """Return what is left of `parts` once `done` bytes are sent or received."""
    for index, part in enumerate(parts):
        if done < len(part):
            return [memoryview(part)[done:], *(memoryview(later) for later in parts[index + 1 :])]
        done -= len(part)
    return []


def _timeval(seconds: float | None) -> bytes:
    """Return a struct timeval. Zero means for ever to the kernel, so less than a microsecond becomes one."""
    microseconds = 0 if seconds is None else max(int(seconds * 1e6), 1)
    return struct.pack("ll", *divmod(microseconds, 1_000_000))


def _ended() -> int:
    raise ConnectionResetError("closed by the server")


def _silent(timeout_s: float | None) -> TimeoutError:
    return TimeoutError(f"no reply within {timeout_s:g} s")
