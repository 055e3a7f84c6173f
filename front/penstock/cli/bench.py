"""``penstock bench``: measures the user's source through a DataLoader and through Penstock, and recommends one."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from penstock.cli import Parser, add_json, whole_number
from penstock.cli.sources import add_sources, add_spec, source_of

if TYPE_CHECKING:
    from penstock.bench.rounds import BenchSetup, FeedMethod
    from penstock.cli.console import Console


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where segments are fastest
BUDGET_BYTES = 64 << 20
"""The least budget. It is small, so that memory for payloads is soon used a second time, as in a long training job."""
SOURCE_S = 0.5
"""The time for which the source alone is measured."""
METHODS = 3
"""The most methods that are compared."""
BATCHES = 4
"""The fewest batches of each trainer in a turn. A larger ``--batch-size`` is reduced to fit."""


class _BenchParser(Parser):
    """A source's parser, with the options of this command."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        add = self.add_argument
        add("--batch-size", type=whole_number(1), default=64, metavar="N", help="default: %(default)s")
        add(
            "--trainers",
            type=whole_number(1),
            default=4,
            metavar="N",
            help="also measure with N trainers (default: %(default)s)",
        )
        add("--workers", type=whole_number(1), metavar="N", help="processes that make samples (default: one per core)")
        add("--seconds", type=whole_number(1), default=120, metavar="S", help="for all of it (default: %(default)s)")
        add_spec(add)
        add_json(self)


EPILOG = (
    "example:\n  penstock bench images photos/ --resize 224x224 --transform augment:flip\n\n"
    "It starts a server of its own. Trainers only take batches: what is compared is who feeds them faster."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_sources(parser, _BenchParser, production=False)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure for the given seconds, and print a recommendation for each number of trainers."""
    from penstock.bench.recommendation import judge
    from penstock.bench.rounds import measure, rounds_in

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    counts = sorted({1, args.trainers})
    with _setup(args, console) as setup, console.progress() as shown:
        methods = _methods(setup, console)
        bar = shown.add("bench", rounds_in(args.seconds) * len(counts) * len(methods), "turns")
        rates = measure(setup, methods, counts, args.seconds, bar.update)
    verdicts = [judge(rates[count], count) for count in counts]
    if args.json:
        found = {"batch_size": setup.batch, "workers": setup.workers, "sample": asdict(setup.sample)}
        fields = [{**asdict(one), "sentence": one.sentence, "samples_per_s": rates[one.trainers]} for one in verdicts]
        console.json({**found, "verdicts": fields})
        return 0
    rows = [(count, method, round(median(found))) for count in counts for method, found in rates[count].items()]
    console.table(rows, ("trainers", "fed by", "samples/s"))
    for verdict in verdicts:
        console.line(verdict.sentence)
    return 0


@contextlib.contextmanager
def _setup(args: argparse.Namespace, console: Console) -> Iterator[BenchSetup]:
    """Yield the source, its sample facts, and a private server."""
    from penstock.bench.rounds import BenchSetup, measure_source, repeated, rounds_in
    from penstock_common.stream.servers.embedded import EmbeddedServer
    from penstock_producer.jobs.fleet import usable_cores
    from penstock_producer.sources.open import open_source

    config = source_of(args)
    source = open_source(config)
    workers = args.workers or usable_cores()
    with contextlib.closing(source), EmbeddedServer() as server:
        sample = measure_source(source, SOURCE_S)
        turn_s = args.seconds / (rounds_in(args.seconds) * METHODS * len({1, args.trainers}))
        made = turn_s * workers / sample.seconds
        batch = min(args.batch_size, max(1, int(made / args.trainers / BATCHES)))
        console.notice(
            f"a sample takes {1000 * sample.seconds:.3g} ms and {sample.nbytes:,.0f} bytes; workers {workers}, batches "
            f"of {batch}, server {server.name} {server.version}; about {args.seconds} s"
        )
        if batch < args.batch_size:
            console.notice(f"a batch of {args.batch_size} takes too long for turns of {turn_s:.1f} s: see --seconds")
        budget_bytes = max(BUDGET_BYTES, int(8 * batch * sample.nbytes))
        with _shared_memory(budget_bytes, console) as folder:
            yield BenchSetup(
                config=repeated(config, source, int(2 * made)),
                source=source,
                sample=sample,
                spec=args.spec,
                url=server.url,
                folder=folder,
                batch=batch,
                workers=workers,
                budget_bytes=budget_bytes,
            )


@contextlib.contextmanager
def _shared_memory(budget_bytes: int, console: Console) -> Iterator[str]:
    """Yield a folder for segments, or '' and a notice if there is no space."""
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free_bytes < 2 * budget_bytes:
        console.notice(f"no segments: {SHARED_MEMORY} has {free_bytes >> 20} MiB, and {budget_bytes >> 19} are needed")
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix=f"penstock-bench-{os.getpid()}-", dir=SHARED_MEMORY) as folder:
        yield folder


def _methods(setup: BenchSetup, console: Console) -> list[FeedMethod]:
    """Return the methods that are compared, the one without Penstock first."""
    from penstock.bench.baselines import from_dataloader, from_pool, has_torch
    from penstock.bench.rounds import FeedMethod

    if has_torch():
        first = FeedMethod("DataLoader", from_dataloader)
    else:
        console.notice(
            'torch is not installed, so a process pool stands for a DataLoader; pip install "penstock[torch]"'
        )
        first = FeedMethod("process pool", from_pool)
    segments = [FeedMethod("Penstock with segments", payload=f"segments:{setup.folder}")] if setup.folder else []
    return [first, FeedMethod("Penstock inline", payload="inline"), *segments]
