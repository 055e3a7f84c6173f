"""``penstock monitor``: a live view of streams in the terminal, and what holds each of them up."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.cli import (
    LOGIN_HINT,
    PORT,
    STREAM_NAME,
    WrongUsage,
    add_json,
    add_url,
    connected,
    needs_password,
    require_web,
    seconds,
    typed,
    url_of,
)
from penstock.cli.interrupts import end_by_signals
from penstock_common.printable import readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.explain.snapshot import StreamSnapshot
    from penstock_common.stream.commands import Client


_PATIENCE_S = 30.0
"""The time for which a browser may take nothing of an answer."""
_SHORTEST_S = 0.1
"""The shortest interval, because the server's time is for data."""


EPILOG = (
    "example:\n  penstock monitor train\n  penstock monitor --web\n"
    "  penstock monitor train --once --json | jq -r '.[].bottleneck.text'\n\n"
    "q or Ctrl-C ends it. It changes nothing and reads no payload. On a terminal without rich, each look is\n"
    "printed below the last. Where stdout is no terminal it prints a line for each look and stream; with --json\n"
    "each look is a line of JSON. docs/monitoring.md explains every number.\n\n"
    "The page of --web also shows the newest samples as pictures. Only this host reaches it, and only with the\n"
    "token in its address.\n\n"
    "exit codes: 0 ended, 1 no server, no such stream, or with --once a damaged one, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("stream", nargs="?", type=STREAM_NAME, help="left out: all streams")
    parser.add_argument(
        "--every",
        type=seconds(_SHORTEST_S, 3600),
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="two looks, one screen, and end")
    parser.add_argument("--web", action="store_true", help="show it in a browser: print the address of a page")
    parser.add_argument("--port", type=PORT, default=0, help="of the page (default: a free one)")
    add_url(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Show streams until Ctrl-C, or once."""
    if args.web:
        return _serve(args, console)
    with connected(args) as client:
        looks = _looks(client, args)
        if args.once:
            next(looks)
            return _show_once(next(looks), args, console)
        try:
            _show(looks, args, console)
        except KeyboardInterrupt:
            console.err.flush()
    return 0


def _looks(client: Client, args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield a record for each stream, at each interval.

    The first record has no rates, and a damaged stream has `error`.
    """
    from penstock.views.monitor import seen
    from penstock_common.errors import DamagedKey, StreamNotFound
    from penstock_common.explain.monitor import StreamMonitor
    from penstock_common.explain.servers import PartitionsAway
    from penstock_common.stream.directory import StreamLister
    from penstock_common.stream.rights import MONITOR, require_rights
    from penstock_common.stream.streams import look_at_each

    require_rights(client, MONITOR, args.stream)
    lister = StreamLister(client)
    monitors: dict[str, StreamMonitor] = {}
    before: dict[str, StreamSnapshot] = {}

    def look(name: str) -> dict[str, Any] | None:
        try:
            snapshot = monitors.setdefault(name, StreamMonitor(client, name)).snapshot()
        except StreamNotFound:
            if args.stream is not None:
                raise
            return None  # deleted since it was listed
        except DamagedKey:
            del monitors[name]  # it was deleted during the look
            raise
        record = seen(before.get(name), snapshot)
        before[name] = snapshot
        found = record["bottleneck"]
        found["remedy"] = typed(found["remedy"], args, client)
        if needs_password(found["remedy"], client):
            found["remedy"] += f"  {LOGIN_HINT}"
        return record

    borne = (PartitionsAway,) if args.stream is not None else (PartitionsAway, DamagedKey)
    due = time.monotonic()
    while True:
        names = [args.stream] if args.stream is not None else lister.names()
        records, errors = look_at_each(names, look, borne)
        reasons = {name: str(error) for name, error in errors.items()} | lister.unseen
        yield [*records, *({"stream": name, "error": why} for name, why in reasons.items())]
        due = max(due + args.every, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _serve(args: argparse.Namespace, console: Console) -> int:
    """Serve the page until Ctrl-C, SIGTERM or SIGHUP."""
    if args.once:
        raise WrongUsage("--once prints one screen, and --web shows a page until it is ended: give one of them")
    require_web("penstock monitor --web", "without --web it needs no server")
    from penstock.gateway.monitor import monitor_app
    from penstock.gateway.serve import address_of, bound, serve
    from penstock.gateway.tokens import new_token

    def looks() -> Iterator[list[dict[str, Any]]]:
        with connected(args) as client:
            yield from _looks(client, args)

    end_by_signals()
    next(looks())  # a wrong address or stream is an error here, and not on the page
    token = new_token()
    with bound("127.0.0.1", args.port, _PATIENCE_S) as listening:
        address = f"{address_of(listening, '127.0.0.1')}/#{token}"
        console.answer({"url": address}, f"the monitor is at {address}; Ctrl-C ends it", as_json=args.json)
        serve(monitor_app(url_of(args), looks, args.every, token), listening, _PATIENCE_S)
    return 0


def _show_once(records: list[dict[str, Any]], args: argparse.Namespace, console: Console) -> int:
    """Print one snapshot, and return the exit code: 1 if a stream is damaged."""
    damaged = [record for record in records if "error" in record]
    if args.json:
        console.json(records)
    elif len(damaged) < len(records) or not records:
        from penstock.cli.monitor_screen import print_streams

        print_streams([record for record in records if "error" not in record], console)
    for record in damaged:
        console.notice(f"penstock: {_line(record)}")
    return 1 if damaged else 0


def _show(looks: Iterator[list[dict[str, Any]]], args: argparse.Namespace, console: Console) -> None:
    if args.json:
        for records in looks:
            console.line(json.dumps(records))
    elif console.is_terminal:
        from penstock.cli.monitor_screen import follow

        follow(looks, console)
    else:
        for records in looks:
            for record in records:
                console.line(_line(record))


def _line(record: dict[str, Any]) -> str:
    """Return one line for a log."""
    from penstock.cli.monitor_screen import rate

    if "error" in record:
        return f"stream {record['stream']!r} cannot be read: {record['error']}"
    held = f"{readable_bytes(record['held_bytes'])} of {readable_bytes(record['budget_bytes'])}"
    groups = "".join(
        f"; {one['name']} takes {rate(one['out']['samples_per_s'])}, lag {one['lag_samples']}"
        for one in record["groups"]
    )
    return (
        f"{record['stream']}: {rate(record['in']['samples_per_s'])} in, {held}{groups}; {record['bottleneck']['text']}"
    )
