"""``penstock produce``: has worker processes make epochs of a source, and shows their progress."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli import Parser, WrongUsage, add_json
from penstock.cli.interrupts import end_by_signals
from penstock.cli.sources import add_sources, options_of, plans_of, worker_count, workers_of

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_producer.jobs.plan import ProductionPlan


class _ProduceParser(Parser):
    """A source's parser, with the options of this command."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.add_argument("--no-workers", action="store_true", help="only queue the jobs, and end")
        takes_watch = str(settings.get("prog", "")).endswith(" images")
        watch = "epochs of the folder's new files, for ever" if takes_watch else argparse.SUPPRESS
        self.add_argument("--watch", action="store_true", help=watch)  # others refuse it with the reason
        add_json(self)


EPILOG = (
    "example:\n  penstock produce images photos/ --resize 224x224 --epochs 3 --workers 4\n"
    "  penstock produce dataset mydata:train --transform augment:flip --stream train\n"
    "  penstock produce dataset mydata:train --follow --ahead 3\n"
    "  penstock produce images --watch incoming/ --resize 224x224"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_sources(parser, _ProduceParser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Produce all epochs.

    Ctrl-C, SIGTERM and SIGHUP stop the production. The same command, started again, continues it.
    """
    from penstock.cli.production import ProductionView, summary_line, tell_classes
    from penstock.views.production import summary_json
    from penstock_producer.jobs.production import SplitProduction

    end_by_signals()
    plans = plans_of(args)
    if args.watch:
        return _watch(args, console, plans)
    if args.follow and args.no_workers:
        raise WrongUsage("--follow stays and watches; --no-workers ends at once: for workers elsewhere --workers 0")
    workers, options = dict.fromkeys(plans, 0) if args.no_workers else workers_of(args), options_of(args)
    try:
        with SplitProduction(plans, options, workers=workers, notify=console.notice) as productions:
            tell_classes(console, options.url, [plan.stream for plan in plans.values()])
            if args.no_workers:
                queued = productions.enqueue_all()
                for part, plan in plans.items():
                    queue = f"{args.queue}.{part}" if part else args.queue
                    _tell_queued(console, args, plan, queued[plan.stream], queue)
                return 0
            with console.progress() as shown:
                views = {part: ProductionView(console, shown, part, as_json=args.json) for part in plans}
                for part, look in productions.run():
                    views[part].update(look)
            for summary in productions.summaries():
                console.answer(summary_json(summary), summary_line(summary), as_json=args.json)
    except KeyboardInterrupt:
        if not getattr(args, "endless", False):  # a feed has reported its progress, and starts again from the beginning
            console.notice("stopped; what is committed stands, and the same command goes on from there")
        return 130
    return 0


def _watch(args: argparse.Namespace, console: Console, plans: dict[str, ProductionPlan]) -> int:
    """Watch until Ctrl-C, SIGTERM or SIGHUP, or until there are --epochs epochs."""
    from penstock.cli.production import ProductionView
    from penstock_producer.jobs.watched_folder import FolderWatch
    from penstock_producer.sources.config import ImagesConfig

    plan = next(iter(plans.values()))
    source = plan.source
    if len(plans) > 1 or not isinstance(source, ImagesConfig) or source.labels or source.path.lower().endswith(".zip"):
        raise WrongUsage("--watch takes one folder of images, labelled by its sub-folders or by --label")
    if args.follow or args.no_workers:
        raise WrongUsage("--watch goes neither with --follow nor with --no-workers; see --workers 0")
    if args.max_bad is None:  # one bad file among three new ones must not lose the others
        plan = plan.model_copy(update={"max_bad": "100%"})
    workers = worker_count(args)
    watch = FolderWatch(plan, options_of(args), workers=workers, epochs=args.epochs, notify=console.notice)
    try:
        with watch, console.progress() as shown:
            console.notice(f"watching {source.path} for stream {plan.stream!r}; Ctrl-C ends it")
            view = ProductionView(console, shown, as_json=args.json)
            for look in watch.run():
                if look is not None:
                    view.update(look)
    except KeyboardInterrupt:
        console.notice("stopped; the same command goes on from there, and takes no file twice")
    value = {"stream": plan.stream, "epochs": watch.epochs, "files": watch.files}
    text = f"watched {source.path}: {watch.files} new files, {watch.epochs} new epochs of {plan.stream!r}"
    console.answer(value, text, as_json=args.json)
    return 0 if args.epochs is not None and watch.epochs >= args.epochs else 130


def _tell_queued(
    console: Console, args: argparse.Namespace, plan: ProductionPlan, epochs: list[int], queue: str
) -> None:
    from penstock_producer.jobs.dispatch import worker_command

    if args.json:
        console.json({"stream": plan.stream, "queued_epochs": epochs})
        return
    which = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]}-{epochs[-1]}"
    words = worker_command(plan.source, plan.block_transform, queue)
    for option, url in (("--url", args.url), ("--queue-url", args.queue_url)):
        if url:
            words += f" {option} {url if '@' not in url else 'URL'}"  # no password on screens and in logs
    console.line(f"queued {which} of {plan.stream!r}, of which nothing is made yet: start workers with `{words}`")
