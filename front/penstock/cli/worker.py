"""``penstock worker``: processes that do the jobs of `penstock produce`, on this host or another."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.cli import WrongUsage, add_url, whole_number
from penstock.cli.interrupts import end_by_signals
from penstock.cli.sources import add_queue, options_of
from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.local_servers import find_servers_of_user
from penstock_common.settings import Settings

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_producer.jobs.allowlist import Allowlist
    from penstock_producer.jobs.autoscaler import Autoscaler
    from penstock_producer.jobs.fleet import Fleet


EPILOG = (
    "example:\n  PENSTOCK_URL=redis://feeder:6379 penstock worker --processes 8 --allow team --root /data\n"
    "  penstock worker --auto --max 16 --allow team\n\n"
    "Whoever can write to the queue can write jobs, and a job names code and files. So a worker does only what\n"
    "--allow and --root name. On your own `penstock server` it needs neither. On any other server it needs one of\n"
    "them, or --allow-any.\n\n"
    "Ctrl-C, SIGTERM or SIGHUP ends it: a worker may take 3 s for the sample it is making, what it has made is\n"
    "kept, and others go on with its shard from there. One that has not ended after 10 s is killed, and loses\n"
    "nothing that was committed. --auto follows what `penstock inspect` shows as wished; several hosts share it\n"
    "by their --max."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument(
        "--processes", type=whole_number(1), metavar="N", help="default: one per core; with --auto, at first: 1"
    )
    parser.add_argument("--auto", action="store_true", help="as many as the trainers need, from 1 to --max")
    parser.add_argument(
        "--max", type=whole_number(1), metavar="N", help="with --auto: at most so many (default: one per core)"
    )
    parser.add_argument("--burst", action="store_true", help="end when the queue is empty")
    add_url(parser)
    parser.add_argument(
        "--allow", action="append", default=[], type=_allowed_name, metavar="MODULE[:NAME]",
        help="jobs may name functions and objects of this module and of those below it, or only NAME; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--root", action="append", default=[], metavar="DIR",
        help="jobs may read files in this folder and below, links resolved; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--allow-any", action="store_true",
        help="jobs may run any code and read any file: for a queue to which nobody writes but yourself",
    )  # fmt: skip
    add_queue(parser)


def _allowed_name(text: str) -> str:
    """Check an argparse argument: ``module``, or ``module:name``."""
    module, _, name = text.partition(":")
    is_file = module.endswith(".py")
    is_module = all(part.isidentifier() for part in module.split(".")) and not is_file
    if not is_module or (":" in text and not name.isidentifier()):
        like = Path(module).stem if is_file else "augment or augment:flip"
        raise argparse.ArgumentTypeError(f"{text!r} is no module or module:name, like {like}")
    return text


def _require_folders(folders: Sequence[str]) -> None:
    """Raise WrongUsage for a folder that does not exist, because no job could read a file of it."""
    for folder in folders:
        if not Path(folder).is_dir():
            what = "a file" if Path(folder).exists() else "nothing"
            raise WrongUsage(f"--root {folder}: found {what} there, expected a folder that jobs may read")


def run(args: argparse.Namespace, console: Console) -> int:
    """Work until Ctrl-C, SIGTERM or SIGHUP. Then each worker ends its sample and returns its shard."""
    _require_folders(args.root)
    from penstock_producer.jobs.autoscaler import Autoscaler
    from penstock_producer.jobs.dispatch import Dispatcher
    from penstock_producer.jobs.fleet import TICK_S, Fleet, WaitNotices, advise, usable_cores

    if args.max and not args.auto:
        raise WrongUsage("--max goes with --auto; a fixed number of workers is --processes N")
    if args.auto and args.burst:
        raise WrongUsage("--auto stays and follows the trainers, --burst ends with the queue: give one of them")
    end_by_signals()
    options = dataclasses.replace(options_of(args), burst=args.burst, is_chatty=True, owner=os.getpid())
    options = dataclasses.replace(options, allowlist=_allowlist(args, options.queue_url))
    # a wrong address or login shows before any worker starts
    dispatcher = Dispatcher(options.queue_url, options.queue, console.notice)
    _require_streams(options.url)
    cores = usable_cores()
    most = max(1, args.max or cores) if args.auto else 0
    count = max(1, args.processes or (1 if args.auto else cores))
    count = min(count, most) if most else count

    scale = Autoscaler(options.url, options.named().name, most, dispatcher.streams) if args.auto else None
    fleet = Fleet(options, count, on_death=dispatcher.return_jobs, most=most)
    waits = WaitNotices(console.notice)
    try:
        console.notice(
            f"{count} worker process{'es' if count > 1 else ''} on queue {options.queue!r}; Ctrl-C ends them"
        )
        while fleet.size:
            fleet.poll()
            waits.look(fleet.waits)
            if scale is not None:
                _follow(scale, fleet, console)
            time.sleep(TICK_S)
    except KeyboardInterrupt:
        console.notice("ending")
    except ServerUnavailable as error:
        raise advise(error) from None
    finally:
        dispatcher.limit_patience(0)
        fleet.stop()
        if scale is not None:
            scale.close()
        dispatcher.close()
    return 0


def _require_streams(url: str) -> None:
    """Raise PenstockError if the streams' server refuses the login, or commands of a writer.

    A job waits for a server that is away.
    """
    from penstock_common.stream.client import connect
    from penstock_common.stream.rights import WRITER, require_commands

    with suppress(ServerUnavailable), closing(connect(url)) as client:
        require_commands(client, WRITER)


def _allowlist(args: argparse.Namespace, queue_url: str) -> Allowlist:
    """Return the names that jobs may use.

    Raises PenstockError if no option gives them, and others may write to the queue.
    """
    from penstock_common.server.error_translation import redacted
    from penstock_producer.jobs.allowlist import ANYTHING, Allowlist

    if args.allow_any:
        if args.allow or args.root:
            raise WrongUsage("--allow-any allows everything: give it, or --allow and --root")
        return ANYTHING
    if args.allow or args.root:
        return Allowlist(tuple(args.allow), tuple(args.root))
    if _is_own(queue_url):
        return ANYTHING
    raise PenstockError(
        f"{redacted(queue_url)} is not your own `penstock server`, and whoever can write to its queue can have a "
        "worker run any code and read any file: say what jobs may name, with --allow MODULE[:NAME] and --root DIR, or "
        "trust all who reach the queue with --allow-any"
    )


def _is_own(queue_url: str) -> bool:
    """Return True if this user started the server, and a password excludes all others."""
    running = find_servers_of_user(Settings.from_environment().own_servers).running
    return bool(urlsplit(queue_url).password) and any(server.url == queue_url for server in running)


def _follow(scale: Autoscaler, fleet: Fleet, console: Console) -> None:
    wanted = scale.look(fleet.size)
    if wanted == fleet.size:
        return
    console.notice(f"{wanted} worker process{'es' if wanted > 1 else ''} instead of {fleet.size}: {scale.load}")
    fleet.resize(wanted)
