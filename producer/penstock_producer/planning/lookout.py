"""What the bare counts of a production do not show: why nothing moves, which samples are bad, who works, who waits.

Counting is ``progress``'s, going on is ``production``'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.streams import Stream
from penstock_producer.planning.dispatch import Dispatcher, worker_command
from penstock_producer.planning.plan import ProductionPlan
from penstock_producer.planning.progress import Progress, bad_reasons
from penstock_producer.sources.allowed import NotAllowed

STALL_S = 2.0
"""Without progress for so long, the reason is looked up and told."""
COUNT_S = 1.0
"""How often workers, and writers that wait for room, are counted."""
ASKED = 256
"""Jobs asked why they wait."""
SHOWN_BAD = 5


class Lookout:
    """One production's."""

    def __init__(self, dispatcher: Dispatcher, client: Client, plan: ProductionPlan, queue: str) -> None:
        self._dispatcher, self._client, self._plan, self._queue = dispatcher, client, plan, queue
        self._moved, self._moved_done = time.monotonic(), -1
        self._counted_s = float("-inf")
        self._workers = self._waiting = 0
        self._bad_seen = 0
        self._bad_told: set[str] = set()

    def explained(self, progress: Progress, stream: Stream, unfinished: Iterable[str], held_back: str) -> Progress:
        """The same with what the eye cannot see. ``unfinished``: ids of jobs; ``held_back`` says why there are none."""
        now = time.monotonic()
        if progress.done != self._moved_done:
            self._moved, self._moved_done = now, progress.done
        if now - self._counted_s >= COUNT_S:
            self._counted_s = now
            self._workers = self._dispatcher.count_workers()
            self._waiting = sum(len(load_roster(self._client, each).waiting) for each in stream.partitions)
        waits = ""
        if now - self._moved >= STALL_S:
            jobs = list(islice(unfinished, ASKED))
            waits = self._why_still(jobs, bool(progress.pids)) if jobs else held_back
        return replace(
            progress, waits=waits, new_bad=self._new_bad(progress, stream), workers=self._workers, waiting=self._waiting
        )

    def _new_bad(self, progress: Progress, stream: Stream) -> tuple[str, ...]:
        if progress.bad == self._bad_seen or len(self._bad_told) >= SHOWN_BAD:
            return ()
        self._bad_seen = progress.bad
        newest = max(seen.epoch for seen in progress.epochs if seen.bad)
        reasons = bad_reasons(self._client, stream, newest, SHOWN_BAD)
        new = tuple(reason for reason in reasons if reason not in self._bad_told)
        self._bad_told.update(new)
        return new

    def _why_still(self, jobs: Sequence[str], has_workers: bool) -> str:
        waits = self._dispatcher.reports(jobs).waits.removeprefix("waiting: ")
        if waits:
            return waits
        if self._dispatcher.count_workers():
            busy = bool(self._dispatcher.running().intersection(jobs))
            return "" if busy else "all workers are busy with other jobs of this queue (--queue keeps them apart)"
        return "its own workers are starting" if has_workers else f"no worker takes jobs: {self._remedy}"

    @cached_property
    def _remedy(self) -> str:
        try:
            return f"start `{worker_command(self._plan.source, self._plan.block_transform, self._queue)}`"
        except NotAllowed as error:
            return str(error)
