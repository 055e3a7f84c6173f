"""Runs an application on a port until the process is asked to end."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from penstock.gateway.limits import MAX_MESSAGE_BYTES
from penstock.gateway.unproven import BoundedHttp, BoundedWebSocket
from penstock_common.errors import PenstockError

BACKLOG = 64
"""The connections that wait in the kernel. asyncio accepts as many at a time before it serves one."""
GRACE_S = 10


def bound(bind: str, port: int, patience_s: float) -> socket.socket:
    """Return a socket that listens. A connection whose peer takes nothing for ``patience_s`` ends.

    Raises:
        PenstockError: the port is taken, or the address is none of this host.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by the connections, on Linux
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience_s * 1000))
        listening.bind((bind, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        other = "--port" if error.errno == errno.EADDRINUSE else "--bind"
        raise PenstockError(f"port {port} of {bind}: {error.strerror}; give another {other}") from None
    return listening


def address_of(listening: socket.socket, bind: str) -> str:
    """Return the URL of a socket that listens, as a client of this host writes it."""
    host = f"[{bind}]" if ":" in bind else bind
    return f"http://{host}:{listening.getsockname()[1]}"


def serve(app: Callable[..., Any], listening: socket.socket, silence_s: float) -> None:
    """Serve an application until Ctrl-C, SIGTERM or SIGHUP.

    Args:
        app: the ASGI application. It accepts the `UnprovenConnection` in the state of a request that shows a token.
        listening: a socket that listens.
        silence_s: the seconds after which a client whose WebSocket answers no ping counts as dead.
    """
    _allow_files()
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws=BoundedWebSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=silence_s / 3,
        ws_ping_timeout=silence_s / 3,
        ws_per_message_deflate=False,
        log_level="error",
        access_log=False,
        backlog=BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=MAX_MESSAGE_BYTES,
    )
    _end_by_hang_up()
    with suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve([listening]))


def _end_by_hang_up() -> None:
    """Have SIGHUP do what it did before, and then end the server as SIGTERM does. An error would break its loop."""
    before = signal.getsignal(signal.SIGHUP)
    if not callable(before):  # ignored, as by nohup
        return

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(KeyboardInterrupt):
            before(number, frame)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGHUP, end)


def _allow_files() -> None:
    """Use every file descriptor that this process may have: a crowd of connections must not use up the last one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
