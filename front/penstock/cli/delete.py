"""``penstock delete``: ends a stream, and removes its keys and files; lists and removes orphan folders of segments."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import STREAM_NAME, WrongUsage, add_json, add_url, connected
from penstock_common.errors import DamagedKey, PenstockError
from penstock_common.printable import listed, readable_bytes, readable_span

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.stream.commands import Client


EPILOG = (
    "example:\n  penstock delete train --yes\n  penstock delete --segments /dev/shm/penstock\n\n"
    "Nothing of it stays on the server, and nothing brings it back. A deletion that was interrupted is run again.\n"
    "Its segments go along, where this host sees them. --segments DIR is for what a server left that was\n"
    "emptied or killed: it lists them, with --yes it removes them. It knows this server alone: see that no other\n"
    "has streams there. What a process uses stays, and what was written in the last 10 minutes.\n\n"
    "exit codes: 0 it is gone, or listed; 1 not confirmed, being read or written, or another error; 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("stream", nargs="?", type=STREAM_NAME, help="its name; `penstock inspect` lists them")
    add_url(parser)
    add_json(parser)
    what = "instead of a stream: the folders of segments in DIR whose streams are not on this server any more"
    parser.add_argument("--segments", metavar="DIR", help=what)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--force", action="store_true", help="also under trainers and producers, which stop with an error"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Refuse while the stream is in use, ask, delete, and print what was removed."""
    from penstock_common.stream.removal.deletion import delete_stream
    from penstock_common.stream.rights import WRITER, require_rights

    if args.segments is not None:
        return _delete_orphans(args, console)
    if args.stream is None:
        console.notice("penstock delete: say which stream (`penstock inspect` lists them), or --segments DIR")
        return 2
    with connected(args) as client:
        require_rights(client, WRITER, args.stream)  # a deletion that is refused halfway leaves a stream without use
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
            console.notice(
                f"its segments in {gone.left} cannot be removed from here, or that folder holds something else: look "
                "at what it holds, and remove it on its host"
            )
    return 0


def _delete_orphans(args: argparse.Namespace, console: Console) -> int:
    """List orphan folders of segments, and with --yes remove the unused ones."""
    from penstock_common.stream.removal.deletion import QUIET_S, find_orphans, has_segments

    if args.stream is not None:
        raise WrongUsage("give a stream or --segments DIR, not both: a stream's own segments go with it")
    if not Path(args.segments).is_dir():
        raise PenstockError(f"there is no folder {args.segments}: give the one that streams have in `payload`, as "
                            "`penstock inspect STREAM` shows it")  # fmt: skip
    with connected(args) as client:
        orphans = find_orphans(client, Path(args.segments))
    rows = []
    for orphan in orphans:
        is_gone = args.yes and not (orphan.is_in_use or orphan.is_fresh) and orphan.folder.remove()
        what = "removed" if is_gone else "left: give --yes to remove it"
        if orphan.is_in_use:
            what = "in use by a process"
        elif orphan.is_fresh:
            what = f"kept until nothing was written for {readable_span(QUIET_S)}"
        rows.append({"folder": str(orphan.folder.path), "bytes": orphan.nbytes, "removed": is_gone})
        if not args.json:
            size, age = readable_bytes(orphan.nbytes), f"written to {readable_span(orphan.quiet_s)} ago"
            console.line(f"{orphan.folder.path}: {size}, {age}: {what}")
    if args.json:
        console.json(rows)
    elif not orphans:
        is_any = has_segments(Path(args.segments))
        console.line(
            f"every folder of segments in {args.segments} is that of a stream on this server"
            if is_any
            else f"{args.segments} has no folders of segments: give the DIR of `--payload segments:DIR`"
        )
    return 0


def _refuse_busy(client: Client, args: argparse.Namespace) -> None:
    from penstock_common.stream.groups.presence import GONE_AFTER
    from penstock_common.stream.removal.deletion import users_of
    from penstock_common.stream.streams import find_stream

    if args.force:  # also if a damaged key hides its users
        return
    stream = find_stream(client, args.stream)
    users = [] if stream is None else users_of(client, stream)
    if users:
        raise PenstockError(
            f"stream {args.stream!r} is in use by {listed(users, 5)}: stop them first, or give --force and "
            f"they stop with an error; {GONE_AFTER}"
        )


def _is_sure(client: Client, args: argparse.Namespace, console: Console) -> bool:
    """Ask the person at the terminal. Without a terminal the answer is no."""
    from penstock_common.stream.groups.roster import load_roster
    from penstock_common.stream.removal.deletion import require_keys
    from penstock_common.stream.streams import find_stream

    require_keys(client, args.stream)
    if not sys.stdin.isatty():
        raise PenstockError(f"deleting {args.stream!r} cannot be undone: give --yes to do it without being asked")
    with suppress(DamagedKey):
        stream = find_stream(client, args.stream)
        if stream is not None:
            held = sum(load_roster(client, partition).bytes for partition in stream.partitions)
            console.notice(f"stream {args.stream!r} holds {held} bytes in {client.hlen(stream.keys.epochs)} epochs")
    return input(f"delete {args.stream!r} for ever? [y/N] ").strip().lower() in ("y", "yes")
