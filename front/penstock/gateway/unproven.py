"""Connections that have shown no token yet: how long, how many, and how much each may send.

uvicorn bounds requests and no connections. Its two protocols are therefore extended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock.gateway.limits import CLOSE_S, MAX_MESSAGE_BYTES, MAX_UNPROVEN, OPEN_S

MAX_BYTES = 3 * MAX_MESSAGE_BYTES
"""The most bytes before a token: a request's header, which a WebSocket parses again, and a message."""
MAX_FRAMES = 64
"""The most frames of a WebSocket before a token. A client may send its first messages at once."""
PIECE_BYTES = 1024
"""The bytes that are parsed before the frames are counted. An empty frame has 6 bytes, and costs as much as others."""


class UnprovenConnection:
    """A connection that has shown no token. It ends at its deadline, or as the oldest of too many."""

    def __init__(self, others: dict[UnprovenConnection, None], transport: asyncio.Transport) -> None:
        if len(others) >= MAX_UNPROVEN:
            next(iter(others)).end()
        self._others, self._transport = others, transport
        self._bytes, self._frames = MAX_BYTES, MAX_FRAMES
        others[self] = None
        loop = asyncio.get_running_loop()
        self.until_s = loop.time() + OPEN_S
        """The time of the event loop at which a client without a token is refused."""
        self._timer = loop.call_at(self.until_s + CLOSE_S, self.end)

    def accept(self) -> None:
        """Take away the bounds, because the connection has shown a token or is gone."""
        self._others.pop(self, None)
        self._timer.cancel()

    def end(self) -> None:
        """Close the connection at once. Whatever it was sent and has not taken is lost."""
        self.accept()
        self._transport.abort()

    def feed(self, data: bytes, parse: Callable[[bytes], None]) -> None:
        """Parse what came. Bytes beyond the limit are parsed only if the connection has shown its token by then."""
        if self not in self._others:
            parse(data)
            return
        left, self._bytes = self._bytes, max(0, self._bytes - len(data))
        parse(data[:left])
        if left < len(data):
            asyncio.get_running_loop().call_soon(self._feed_more, data[left:], parse)

    def _feed_more(self, data: bytes, parse: Callable[[bytes], None]) -> None:
        if self._transport.is_closing():
            return
        if self in self._others:
            self.end()
        else:
            parse(data)

    def spend(self, frames: int) -> bool:
        """Count frames that came. Return whether the connection may send them."""
        if self in self._others:
            self._frames -= frames
        return self._frames >= 0


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose client may send few frames before its token."""

    def data_received(self, data: bytes) -> None:
        """Parse what came, piece by piece: a parser makes tens of thousands of frames of one chunk."""
        self.app_state["unproven"].feed(data, self._parse)

    def _parse(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + PIECE_BYTES])

    def handle_events(self) -> None:
        """Handle the frames of one piece."""
        if self.app_state["unproven"].spend(len(self.conn.events)):
            super().handle_events()
        else:
            self.app_state["unproven"].end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place to another connection."""
        self.app_state["unproven"].accept()
        super().connection_lost(exc)


class BoundedHttp(H11Protocol):
    """A connection that is bounded from its first byte on. It may become a WebSocket."""

    unproven: ClassVar[dict[UnprovenConnection, None]] = {}
    """The connections of this process without a token, oldest first."""
    app_state: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the connection's time. Applications find it in the state of their requests."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "unproven": UnprovenConnection(self.unproven, transport)}

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self.app_state["unproven"].feed(data, super().data_received)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place to another connection."""
        self.app_state["unproven"].accept()
        super().connection_lost(exc)
