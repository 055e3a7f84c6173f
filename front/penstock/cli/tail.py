"""``penstock tail``: the new entries of a stream, one line for each, as they come."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli import add_stream, url_of, whole_number
from penstock_common.printable import readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.stream.index import WrittenBlock


_LOOK_S = 0.5


EPILOG = (
    "example:\n  penstock tail train\n  penstock tail train -n 100 --once\n"
    "  penstock tail train --json | jq -c 'select(.bad > 0)'\n\n"
    "Each line tells epoch, shard, offsets [first, end) of the shard, payload bytes, age, and the entry's id. It\n"
    "reads indexes only, never a payload; with --json each line is an object. Without --once it waits 60 s for a\n"
    "server that is away. Ctrl-C ends it.\n\n"
    "exit codes: 0 ended, 1 no such stream, deleted, or no server, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    parser.add_argument(
        "-n", "--last", type=whole_number(0), default=10, metavar="N", help="begin with so many (default: 10)"
    )
    parser.add_argument("--once", action="store_true", help="print those, and end")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print entries until Ctrl-C."""
    from penstock_common.stream.client import connect
    from penstock_common.stream.index import IndexTail
    from penstock_common.waiting import to_stderr

    with connect(url_of(args), bears_outages=None if args.once else to_stderr) as client:
        tail = IndexTail(client, args.stream)
        _print(tail.last(max(0, args.last)), args, console)
        try:
            while not args.once:
                time.sleep(_LOOK_S)
                _print(tail.look(), args, console)
        except KeyboardInterrupt:
            return 0
    return 0


def _print(written: list[WrittenBlock], args: argparse.Namespace, console: Console) -> None:
    for one in written:
        console.line(json.dumps({"stream": args.stream, **asdict(one)}) if args.json else _line(one))


def _line(one: WrittenBlock) -> str:

    where = f"epoch {one.epoch} shard {one.shard} [{one.first}, {one.end})"
    bad = f", {one.bad} bad" if one.bad else ""
    if one.age_s is None:
        return f"{where}  no sample could be made{bad}"
    lies = f" in {one.segment}" if one.segment else ""
    return f"{where}  {one.samples} samples{bad}, {readable_bytes(one.bytes)}{lies}  {one.age_s:.1f} s ago  {one.entry}"
