"""``penstock delete``: ends a stream for everybody and removes everything of it from the server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.cli import add_stream, url_of

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.stream.commands import Client

NAME = "delete"
HELP = "remove a stream with all its epochs and groups"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also under readers and writers; they stop with an error")
    parser.epilog = (
        "example:\n  penstock delete train --yes\n\n"
        "Nothing of it stays on the server, and nothing brings it back. A deletion that was interrupted is run again."
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Refuses while somebody is at work, asks, deletes, and says what is gone."""
    from penstock_common.stream.connection import connect
    from penstock_common.stream.deletion import delete_stream
    from penstock_common.stream.suitability import readable_bytes

    with connect(url_of(args)) as client:
        _refuse_busy(client, args)
        if not (args.yes or _is_sure(client, args, console)):
            console.notice("nothing was deleted")
            return 1
        gone = delete_stream(client, args.stream)
    if args.json:
        console.json(
            {"stream": gone.stream, "epochs": gone.epochs, "bytes": gone.nbytes, "keys": gone.keys, "left": gone.left}
        )
    else:
        console.line(
            f"stream {gone.stream!r} is deleted: {gone.epochs} epochs, {readable_bytes(gone.nbytes)} of payload, "
            f"{gone.keys} keys"
        )
        if gone.left:
            console.notice(f"its segments in {gone.left} cannot be removed from here: remove that folder on its host")
    return 0


def _refuse_busy(client: Client, args: argparse.Namespace) -> None:
    from penstock_common.errors import StreamBusy
    from penstock_common.stream.deletion import users_of
    from penstock_common.stream.streams import find_stream

    stream = find_stream(client, args.stream)
    users = [] if stream is None or args.force else users_of(client, stream)
    if users:
        more = f" and {len(users) - 5} more" if len(users) > 5 else ""
        raise StreamBusy(
            f"stream {args.stream!r} is in use by {', '.join(users[:5])}{more}: stop them first, or give --force and "
            "they stop with an error"
        )


def _is_sure(client: Client, args: argparse.Namespace, console: Console) -> bool:
    """Asks whoever sits there; without a terminal nobody can answer."""
    from penstock_common.errors import PenstockError
    from penstock_common.stream.streams import find_stream

    if not sys.stdin.isatty():
        raise PenstockError(f"deleting {args.stream!r} cannot be undone: give --yes to do it without being asked")
    stream = find_stream(client, args.stream)
    if stream is not None:
        held = sum(int(client.hget(partition.roster, "bytes") or 0) for partition in stream.partitions)
        console.notice(f"stream {args.stream!r} holds {held} bytes in {client.hlen(stream.keys.epochs)} epochs")
    return input(f"delete {args.stream!r} for ever? [y/N] ").strip().lower() in ("y", "yes")
