"""Sockets with a limit on a server's silence, which measure the time spent in waiting."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final, Protocol

from penstock_common.server.resp import Part, ReceivingSocket

REPLY_TIMEOUT_S: Final = 30.0
"""The longest wait for an answer that needs no time. Redis 6.2 is silent during a long UNLINK or FLUSHALL."""

PIECE_BYTES: Final = 16 << 20
"""The most bytes that one receive waits for. On a slow network a large payload must not count as silence."""

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)


class SendingSocket(ReceivingSocket, Protocol):
    """A blocking socket with a bound on silence, for both directions."""

    waited_s: float
    """Seconds spent in receiving, measured around system calls. One call may bring many small entries."""

    heard_s: float
    """When the last receive ended, by `time.monotonic`."""

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound the wait of each later receive for its first byte. None waits for ever."""

    def send_all(self, parts: Sequence[Part]) -> None:
        """Hand every byte to the kernel."""


class PlainSocket:
    """A TCP or unix socket. The kernel keeps the time, since Python's own timeouts cost a poll before every call."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(REPLY_TIMEOUT_S))
        self._timeout_s: float | None = -1.0
        self.waited_s = self.heard_s = 0.0

    def set_timeout(self, timeout_s: float | None) -> None:
        """See SendingSocket."""
        if timeout_s != self._timeout_s:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
            self._timeout_s = timeout_s

    def receive(self, view: memoryview) -> int:
        """Receive what one call brings."""
        began = time.monotonic()
        try:
            return self._sock.recv_into(view) or _ended()
        except BlockingIOError:
            raise _silent(self._timeout_s) from None
        finally:
            self.heard_s = time.monotonic()
            self.waited_s += self.heard_s - began

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


class TlsSocket:
    """A TLS socket. It has neither sendmsg nor recvmsg_into, so it works record by record, but still in place."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._timeout_s: float | None = REPLY_TIMEOUT_S
        self.waited_s = self.heard_s = 0.0

    def set_timeout(self, timeout_s: float | None) -> None:
        """See SendingSocket."""
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def receive(self, view: memoryview) -> int:
        """Receive what is left of one record."""
        began = time.monotonic()
        try:
            return self._sock.recv_into(view) or _ended()
        except TimeoutError:
            raise _silent(self._timeout_s) from None
        finally:
            self.heard_s = time.monotonic()
            self.waited_s += self.heard_s - began

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
