"""``penstock trim``: one pass of retention now, for streams that nobody writes to at the moment."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli import add_stream, url_of

if TYPE_CHECKING:
    from penstock.cli.console import Console

NAME = "trim"
HELP = "release what a stream's retention gives up, now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    parser.epilog = (
        "example:\n  penstock epochs retain train epochs:3\n  penstock trim train\n\n"
        "Writers and workers do the same by themselves every 10 seconds. What some group is owed, what is pinned and\n"
        "what a replay holds is never released."
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """One pass, and what it did."""
    from penstock_common.stream.link.connection import connect
    from penstock_common.stream.servers.suitability import readable_bytes
    from penstock_common.stream.streams import load_stream
    from penstock_producer.keeping.janitor import make_fit, tidy

    with connect(url_of(args)) as client:
        stream = load_stream(client, args.stream)
        done = tidy(client, stream, console.notice)
        freed = done.freed_bytes + make_fit(client, stream, console.notice)
    if args.json:
        result = {"released_epochs": done.released, "freed_bytes": freed, "expired_groups": done.expired}
        console.json({"stream": stream.name, "retention": stream.retention, **result})
    else:
        one = len(done.released) == 1
        which = f"epoch{'' if one else 's'} {', '.join(map(str, done.released))}" if done.released else "no whole epoch"
        console.line(
            f"released {which} of {stream.name!r} (retention {stream.retention}): {readable_bytes(freed)} freed"
        )
    return 0
