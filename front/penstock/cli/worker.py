"""``penstock worker``: processes that do the jobs of `penstock produce`, on this host or another."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import time
from typing import TYPE_CHECKING

from penstock.cli.sources import add_queue, options_of

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_producer.oversight import Death

NAME = "worker"
HELP = "do the jobs of penstock produce, here or on another host"

_TICK_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("--processes", type=int, metavar="N", help="default: one per core")
    parser.add_argument("--burst", action="store_true", help="end when the queue is empty")
    parser.add_argument("--url", help="the server that holds the streams (default: PENSTOCK_URL, else localhost:6379)")
    add_queue(parser)
    parser.epilog = "example:\n  PENSTOCK_URL=redis://feeder:6379 penstock worker --processes 8"


def run(args: argparse.Namespace, console: Console) -> int:
    """Until Ctrl-C or SIGTERM; both let each worker end its sample and give its shard back."""
    from penstock_common.errors import ServerUnavailable
    from penstock_producer.dispatch import Dispatcher
    from penstock_producer.fleet import LOST_SERVER, STOPPED, Fleet, advise

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = dataclasses.replace(options_of(args), burst=args.burst, is_chatty=True, owner=os.getpid())
    # an address that is wrong shows before any worker starts
    dispatcher = Dispatcher(options.queue_url, options.queue, console.notice)
    count = max(1, args.processes or os.cpu_count() or 1)

    def on_death(death: Death) -> None:
        if death.reason not in (STOPPED, LOST_SERVER):
            console.notice(f"{death.reason}; another takes its place")
        dispatcher.return_jobs(death)

    fleet = Fleet(options, count, on_death=on_death)
    try:
        console.notice(
            f"{count} worker process{'es' if count > 1 else ''} on queue {options.queue!r}; Ctrl-C ends them"
        )
        while not fleet.is_empty:
            fleet.poll()
            time.sleep(_TICK_S)
    except KeyboardInterrupt:
        console.notice("ending")
    except ServerUnavailable as error:
        raise advise(error) from None
    finally:
        dispatcher.hurry(0)
        fleet.stop()
        dispatcher.close()
    return 0
