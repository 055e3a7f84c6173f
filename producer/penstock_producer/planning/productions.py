"""Several productions side by side, one for each part of a split: a stream, a queue and workers of its own for each.

Of their own, because a trainer reads one part while it does not read the other: workers that waited for room in the
one could not make what is awaited of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from penstock_common.errors import PenstockError
from penstock_common.waiting import Notify, to_stderr
from penstock_producer.endless import EndlessProduction
from penstock_producer.planning.plan import EpochFailed, ProductionPlan
from penstock_producer.planning.production import Production
from penstock_producer.planning.progress import Progress, Summary
from penstock_producer.working.worker import WorkerOptions


class Productions:
    """Use it in a ``with`` block, and go through `run` to the end. Where nothing is split it is one, named ''."""

    def __init__(
        self,
        plans: Mapping[str, ProductionPlan],
        options: WorkerOptions,
        *,
        workers: Mapping[str, int],
        notify: Notify = to_stderr,
    ) -> None:
        self._stack = ExitStack()
        self._streams = {part: plan.stream for part, plan in plans.items()}
        self.parts: dict[str, Production | EndlessProduction] = {}
        """By name of the part."""
        with ExitStack() as unfinished:
            for part, plan in plans.items():
                own = replace(options, queue=f"{options.queue}.{part}") if part else options
                made: Production | EndlessProduction
                if getattr(plan.source, "endless", False):
                    made = EndlessProduction(plan, own, notify=notify)
                else:
                    made = Production(plan, own, workers=workers[part], notify=notify)
                unfinished.push(made)
                self.parts[part] = made
            self._stack = unfinished.pop_all()

    @property
    def samples_per_epoch(self) -> int | None:
        """Of all parts; None where only reading tells."""
        each = [production.samples_per_epoch for production in self.parts.values()]
        known = [samples for samples in each if samples is not None]
        return sum(known) if len(known) == len(each) else None

    def run(self) -> Iterator[tuple[str, Progress]]:
        """Each part's progress in turn, until all are produced. If one fails, the others are abandoned too."""
        running = {part: production.run() for part, production in self.parts.items()}
        while running:
            for part in list(running):
                try:
                    look = next(running[part])
                except StopIteration:
                    del running[part]
                except EpochFailed:
                    self._abandon_but(part)
                    raise
                else:
                    yield part, look

    def _abandon_but(self, failed: str) -> None:
        """A trainer that waits for another part would never hear that this one failed."""
        for part, production in self.parts.items():
            if part != failed:
                with suppress(PenstockError):
                    production.abandon()

    def summaries(self) -> list[Summary]:
        """After `run`: what was made, part by part."""
        return [production.summary() for production in self.parts.values()]

    def enqueue_all(self) -> dict[str, list[int]]:
        """Stream -> epochs opened and queued for workers elsewhere, which then are left alone."""
        queued: dict[str, list[int]] = {}
        for part, production in self.parts.items():
            production.enqueue_all()
            queued[self._streams[part]] = list(production.epochs)
            production.leave()
        return queued

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)
