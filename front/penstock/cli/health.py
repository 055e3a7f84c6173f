"""``penstock health``: whether a worker or a trainer of this host gave a heartbeat lately, for containers."""

from __future__ import annotations

import argparse
import re
import socket
from typing import TYPE_CHECKING

from penstock.cli import GROUP_NAME, STREAM_NAME, add_jobs, add_url, opened, queue_url_of, seconds, url_of

if TYPE_CHECKING:
    from penstock.cli.console import Console


WITHIN_S = 15.0
"""The age at which a heartbeat is too old. Workers give one every 3 s, and members every 2 s. A worker's job goes to
another worker after this time.
"""


EPILOG = (
    "example:\n  penstock health worker\n  penstock health trainer train --group resnet\n\n"
    "For the health check of a container: a process that is stopped, or cut off from its server, gives no sign.\n\n"
    "exit codes: 0 there was a sign, 1 there was none, or no server answers, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    text = "any worker process of this host"
    worker = actions.add_parser("worker", help=text, description=text)
    add_jobs(worker)
    text = "any member of a group that runs on this host, or the one that --member names"
    trainer = actions.add_parser("trainer", help=text, description=text)
    trainer.add_argument("stream", type=STREAM_NAME, help="its name; `penstock inspect` lists them")
    trainer.add_argument("--group", type=GROUP_NAME, required=True, metavar="NAME", help="the trainer's group")
    trainer.add_argument("--member", metavar="NAME", help="of a Tuning(member=...), or rank-0 of order=Canonical")
    for one in (worker, trainer):
        add_url(one)
        one.add_argument(
            "--within", type=seconds(1, 3600), default=WITHIN_S, metavar="S", help="how lately (default: %(default)g s)"
        )


def run(args: argparse.Namespace, console: Console) -> int:
    """Print when the last heartbeat came. Raises PenstockError if it is too long ago."""
    from penstock_common.errors import PenstockError

    ages, what = (_worker_ages if args.action == "worker" else _member_ages)(args)
    if not ages:
        raise PenstockError(f"there is no {what}; expected a sign of life in the last {args.within:g} s")
    text = f"the last sign of life of a {what} came {max(0.0, min(ages)):.1f} s ago"
    if min(ages) > args.within:
        raise PenstockError(f"{text}; expected one in the last {args.within:g} s")
    console.line(text)
    return 0


def _worker_ages(args: argparse.Namespace) -> tuple[list[float], str]:
    from penstock_producer.jobs.dispatch import Dispatcher

    host = socket.gethostname()
    dispatcher = Dispatcher(queue_url_of(args) or url_of(args), args.queue)
    try:
        return dispatcher.heard_of(host), f"worker of host {host!r} on queue {args.queue!r}"
    finally:
        dispatcher.close()


def _member_ages(args: argparse.Namespace) -> tuple[list[float], str]:
    from penstock_common.stream.commands import server_ms
    from penstock_common.stream.groups.roster import load_roster
    from penstock_consumer.read.options import host_prefix

    own = re.compile(re.escape(args.member) if args.member else re.escape(host_prefix()) + r"\d+(-\d+)?")
    with opened(args) as (client, stream):
        first = stream.partitions[0]
        roster, now = load_roster(client, first), server_ms(client, first.roster)
    members = [
        seen for (group, member), seen in roster.members.items() if group == args.group and own.fullmatch(member)
    ]
    which = repr(args.member) if args.member else f"of host {socket.gethostname()!r}"
    return [(now - seen) / 1000 for seen in members], f"member {which} in group {args.group!r} of {args.stream!r}"
