"""The pool of a client's connections. It closes every connection itself, and leaves none to the garbage collector."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

import redis

CHECKS_NAME: Final = "ssl_check_hostname"
"""The option of an address that says whether a certificate has to name the host."""


def ask_once(connection: Any, *command: str) -> Any:
    """Connect, return the answer to one command, and close the connection."""
    try:
        connection.connect()
        connection.send_command(*command)
        return connection.read_response()
    finally:
        connection.disconnect()


class ClientPool(redis.ConnectionPool):
    """The connections of a client to one server. Any thread may end them while others use them."""

    def __init__(self, **settings: Any) -> None:
        self._made: WeakSet[Any] = WeakSet()
        self._made_lock = threading.Lock()
        self._is_closed = False
        if issubclass(settings.get("connection_class", redis.Connection), redis.SSLConnection):
            # redis-py 5.3 checks no name by default, and fails at the check of one without a check of the certificate
            is_any_certificate = settings.get("ssl_cert_reqs", "required") in ("none", None, ssl.CERT_NONE)
            settings[CHECKS_NAME] = not is_any_certificate and settings.get(CHECKS_NAME, True)
        super().__init__(**settings)

    def make_connection(self) -> Any:
        """See ConnectionPool."""
        connection = super().make_connection()
        with self._made_lock:
            self._made.add(connection)
        return connection

    def release(self, connection: Any) -> None:
        """See ConnectionPool. It closes a connection that the pool does not keep: after `close`, or after `reset`."""
        is_kept = not self._is_closed and connection in self._in_use_connections
        super().release(connection)
        if not is_kept:
            connection.disconnect()

    def close(self) -> None:
        """See ConnectionPool. A thread that still uses a connection may connect again, and `release` closes that."""
        self._is_closed = True
        self.disconnect()

    def shut(self) -> None:
        """Shut every socket. The threads that use a connection find it lost, and close it themselves.

        ConnectionPool.disconnect takes the socket away from under them, and they fail by a TypeError.
        """
        with self._made_lock:
            made = list(self._made)
        for connection in made:
            sock = getattr(connection, "_sock", None)
            with suppress(OSError):  # it was closed in this moment
                if isinstance(sock, socket.socket) and connection.pid == os.getpid():  # not its parent's
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
