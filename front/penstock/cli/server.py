"""``penstock server``: a private redis-server in the foreground, with the settings Penstock's guarantees need."""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING

from penstock.cli import byte_size

if TYPE_CHECKING:
    from penstock.cli.console import Console

NAME = "server"
HELP = "run a private redis-server in the foreground"

DEFAULT_PORT = 6379
"""Where a Writer or Loader without a URL looks."""
_MAX_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--maxmemory", type=byte_size, metavar="SIZE", help="e.g. 2gb (default: no limit)")
    parser.add_argument("--aof", metavar="DIR", help="keep an append-only file there; streams survive a restart")
    parser.add_argument("--executable", metavar="PATH", help="a redis-server or valkey-server (default: found on PATH)")
    parser.epilog = (
        "example:\n  penstock server --port 6400 --maxmemory 2gb\n  PENSTOCK_URL=redis://127.0.0.1:6400 python train.py"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Until Ctrl-C or SIGTERM; both end it cleanly, with exit code 0."""
    from penstock_common.errors import ServerUnavailable
    from penstock_common.stream.servers.embedded import EmbeddedServer

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with EmbeddedServer(
            args.executable,
            maxmemory_bytes=args.maxmemory,
            port=args.port or None,
            appendonly=args.aof is not None,
            directory=args.aof,
            password="",
        ) as server:
            console.line(
                f"{server.name} {server.version} ({server.executable}) is ready at {server.url}\n"
                f"  use it:       export PENSTOCK_URL={server.url}\n"
                f"  look inside:  redis-cli -u {server.url}\n"
                "  end it:       Ctrl-C"
            )
            server.wait()
            raise ServerUnavailable(f"the server ended by itself; it said: {server.last_words()}")
    except KeyboardInterrupt:
        console.notice("server ended")
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to {_MAX_PORT})")
    return int(text)
