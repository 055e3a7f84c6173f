"""``penstock server``: a private redis-server in the foreground, with the settings Penstock's guarantees need."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import PORT, byte_size
from penstock.cli.interrupts import end_by_signals
from penstock_common.errors import ServerUnavailable
from penstock_common.local_servers import announced, find_servers_of_user

if TYPE_CHECKING:
    from penstock.cli.console import Console


DEFAULT_PORT = 6379
"""The port that a Writer or Loader without a URL tries."""


EPILOG = (
    "example:\n  penstock server --port 6400 --maxmemory 2gb\n"
    '  export PENSTOCK_URL="$(penstock server --print-url --port 6400)"\n\n'
    "The server asks for a random password. Your own Python programs on this host find its URL in a file that\n"
    "only you can read, unless PENSTOCK_URL names another. Node programs need PENSTOCK_URL. --aof DIR keeps\n"
    "the password in DIR, so it stays the same."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("--port", type=PORT, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    parser.add_argument(
        "--maxmemory", type=_memory_size, metavar="SIZE", help="0 for no limit (default: half of this host's)"
    )
    parser.add_argument("--aof", metavar="DIR", help="keep an append-only file there; streams survive a restart")
    parser.add_argument("--executable", metavar="PATH", help="a redis-server or valkey-server (default: found on PATH)")
    parser.add_argument("--no-password", action="store_true", help="let in every user of this host, to run any code")
    parser.add_argument(
        "--print-url", action="store_true", help="start none: print the URL, with the password, of the one that runs"
    )


def _memory_size(text: str) -> int:
    """Parse 0, or enough memory for a stream and for the part that is kept free, as an argparse type."""
    from penstock_common.stream.servers.suitability import LEAST_BUDGET_BYTES, usable_bytes

    size = byte_size(text)
    if size and usable_bytes(size) < LEAST_BUDGET_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is too little to hold a stream: give 64mb or more, as in 2gb")
    return size


def run(args: argparse.Namespace, console: Console) -> int:
    """Run until Ctrl-C, SIGTERM or SIGHUP. Each of them ends the server cleanly, with exit code 0."""
    from penstock_common.settings import Settings
    from penstock_common.stream.servers.embedded import EmbeddedServer
    from penstock_producer.jobs.watchdog import machine_bytes

    folder = Settings.from_environment().own_servers
    if args.print_url:
        console.line(_running_url(folder, args.port))
        return 0
    port = DEFAULT_PORT if args.port is None else args.port
    _refuse_second(folder, port)
    end_by_signals()
    try:
        with (
            EmbeddedServer(
                args.executable,
                maxmemory_bytes=(machine_bytes() or 0) // 2 if args.maxmemory is None else args.maxmemory,
                port=port or None,
                appendonly=args.aof is not None,
                directory=args.aof,
                password="" if args.no_password else None,
            ) as server,
            announced(server.url, server.port, folder) as file,
        ):
            if args.no_password:
                console.notice(
                    "warning: without a password every user of this host can read and write its streams, and run code "
                    "as the user of its workers: leave --no-password out"
                )
            console.lines(
                f"{server.name} {server.version} ({server.executable}) is ready at {server.address}\n"
                f"  use it:       your Python programs and `penstock` on this host find it in {file}\n"
                "                Node programs and redis-cli need its URL:\n"
                f'                export PENSTOCK_URL="$(penstock server --print-url --port {server.port})"\n'
                '  look inside:  redis-cli -u "$PENSTOCK_URL"\n'
                "  end it:       Ctrl-C"
            )
            server.wait()
            raise ServerUnavailable(f"the server ended by itself; it said: {server.last_words()}")
    except KeyboardInterrupt:
        console.notice("server ended")
    return 0


def _refuse_second(folder: Path, port: int) -> None:
    """Raise ServerUnavailable if this user's own server already has the port."""
    for server in find_servers_of_user(folder).running:
        if server.port == port:
            raise ServerUnavailable(
                f"your `penstock server` runs already at redis://127.0.0.1:{port}, and your Python programs find it; "
                f'for Node programs: `export PENSTOCK_URL="$(penstock server --print-url --port {port})"`; another '
                "one: `penstock server --port 0`"
            )


def _running_url(folder: Path, port: int | None) -> str:
    running = find_servers_of_user(folder).running
    for server in running:
        if port is None or server.port == port:
            return server.url
    others = ", ".join(str(server.port) for server in running)
    found = f"only on port {others}" if running else f"none says so in {folder}"
    where = "" if port is None else f" on port {port}"
    raise ServerUnavailable(f"no `penstock server` of this user runs here{where} ({found}): start one")
