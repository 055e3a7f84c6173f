"""``penstock produce``: has worker processes make epochs of a source, and shows how far they are."""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING

from penstock.cli import Parser, add_json
from penstock.cli.sources import add_sources, options_of, plan_of, worker_count

if TYPE_CHECKING:
    from penstock.cli.console import Console

NAME = "produce"
HELP = "make epochs of a source with worker processes"


class _Parser(Parser):
    """A source's parser, with what only this command has."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.add_argument("--no-workers", action="store_true", help="only queue the jobs, and end")
        add_json(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_sources(parser, _Parser)
    parser.epilog = (
        "example:\n  penstock produce images photos/ --resize 224x224 --epochs 3 --workers 4\n"
        "  penstock produce dataset mydata:train --transform augment:flip --stream train"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Until all is produced. Ctrl-C and SIGTERM stop it; the same command started again goes on."""
    from penstock.cli.production import ProductionView, tell
    from penstock_producer.production import Production

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers = 0 if args.no_workers else worker_count(args)
    try:
        with Production(plan_of(args), options_of(args), workers=workers, notify=console.notice) as production:
            if args.no_workers:
                production.enqueue_all()
                epochs = production.epochs
                production.leave()
                _tell_queued(console, args, list(epochs))
                return 0
            with console.progress() as shown:
                view = ProductionView(console, shown)
                for look in production.run():
                    view.update(look)
            tell(console, production.summary(), args.json)
    except KeyboardInterrupt:
        console.notice("stopped; what is committed stands, and the same command goes on from there")
        return 130
    return 0


def _tell_queued(console: Console, args: argparse.Namespace, epochs: list[int]) -> None:
    if args.json:
        console.json({"stream": args.stream, "queued_epochs": epochs})
        return
    one = len(epochs) == 1
    which, them = (f"epoch {epochs[0]}", "it") if one else (f"epochs {epochs[0]}-{epochs[-1]}", "them")
    console.line(f"queued {which} of {args.stream!r}; `penstock worker` makes {them}")
