"""The progress of a production, and what counts do not show: why it stands still, which samples are bad, who works.

The values are read from manifests, shard indexes, the quarantine and the queue. A command shows them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice

from penstock_common.explain.snapshot import held_bytes
from penstock_common.printable import printable
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_ends
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import Manifest, begun_shards
from penstock_common.stream.mending.bad import read_reason
from penstock_common.stream.streams import Stream
from penstock_common.waiting import WAITING
from penstock_producer.jobs.dispatch import SHOWN_ERROR, WORKER_SILENCE_S, Dispatcher, worker_command
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.worker import HEARTBEAT_TTL_S
from penstock_producer.sources.allowed import NotAllowed

RUNNING_SHARDS = 64
"""Jobs run in order, so the running ones are among the first unfinished ones. Looking at more costs and shows nothing.
"""


@dataclass(frozen=True)
class EpochProgress:
    """The progress of one epoch."""

    epoch: int
    state: str
    samples: int | None
    """The planned samples, or None while they are not known."""
    done: int = 0
    """The committed samples, with the bad ones."""
    bad: int = 0
    sample_bytes: float = 0.0
    """The mean payload of a good sample, or 0 while it is not known."""

    @property
    def nbytes(self) -> int:
        """The committed payload bytes, about."""
        return round((self.done - self.bad) * self.sample_bytes)


@dataclass(frozen=True)
class ProductionProgress:
    """The progress of a production at one moment."""

    epochs: tuple[EpochProgress, ...]
    """The epochs that were begun, in order."""
    samples: int | None
    """The planned samples of all epochs."""
    waits: str = ""
    """The reason why nothing moves, if nothing does."""
    is_wait: bool = True
    """Whether ``waits`` says what is awaited. Else it is a notice of a worker, the newest that it has."""
    pids: tuple[int, ...] = ()
    """The process ids of live local workers."""
    new_bad: tuple[str, ...] = ()
    """Some reasons of bad samples that were found since the last look."""
    more_bad: str = ""
    """The command that names the other bad samples. It is given once, when there are some."""
    workers: int = 0
    """The workers that listen to the queue, on any host."""
    waiting: int = 0
    """The writers of the stream that wait for quota."""

    @property
    def done(self) -> int:
        """The committed samples, with the bad ones."""
        return sum(epoch.done for epoch in self.epochs)

    @property
    def bad(self) -> int:
        """The samples that could not be made."""
        return sum(epoch.bad for epoch in self.epochs)


@dataclass(frozen=True)
class ProductionSummary:
    """The result of a finished production."""

    stream: str
    epochs: tuple[int, ...]
    samples: int
    """The samples, with the bad ones."""
    bad: int
    nbytes: int
    seconds: float
    workers: tuple[str, ...] = field(default=())
    """The names of the worker processes that took part."""
    made_before: int = 0
    """The samples that earlier runs had committed, of all samples."""


def look(client: Client, stream: Stream, manifest: Manifest, before: EpochProgress | None = None) -> EpochProgress:
    """Return how far an epoch is.

    ``before`` is the last look, which knows a sample's size if some were removed since.
    """
    held, is_less = held_bytes(client, stream, manifest.epoch)
    done = sum(manifest.done.values())
    running = [s for s in begun_shards(client, stream, manifest) if s not in manifest.done][:RUNNING_SHARDS]
    done += sum(index_ends(client, stream, manifest.epoch, running).values())
    bad = sum(int(client.hlen(partition.quarantine(manifest.epoch))) for partition in stream.partitions)
    # the bytes held were read first: they are no more than what was made, and less after retention
    weight = held / (done - bad) if done > bad else 0.0
    sample_bytes = max(weight, before.sample_bytes) if is_less and before is not None else weight
    return EpochProgress(manifest.epoch, manifest.state, manifest.samples, done, bad, sample_bytes)


def bad_reasons(client: Client, stream: Stream, epoch: int, limit: int) -> list[str]:
    """Return why some samples of an epoch could not be made."""
    pages = (client.hscan_iter(partition.quarantine(epoch), count=limit) for partition in stream.partitions)
    return [read_reason(value) for _, value in islice(chain.from_iterable(pages), limit)]


STALL_S = 2.0
"""The time without progress after which the reason is looked up and shown."""
SHOWN_SHARDS = 5
"""The number of shards that one sentence names."""
COUNT_S = 1.0
"""The time between two counts of the workers, and of the writers that wait for quota."""
ASKED = 256
"""The number of jobs that are asked why they wait."""
SHOWN_BAD = 5
"""The number of bad samples of a production after which no more are named. The others are counted."""


def bad_command(stream: str) -> str:
    """Return the command that names all bad samples of a stream."""
    return shlex.join(["penstock", "bad", "list", stream])


class ProgressDetails:
    """The details of one production."""

    def __init__(self, dispatcher: Dispatcher, client: Client, plan: ProductionPlan, queue: str) -> None:
        self._dispatcher, self._client, self._plan, self._queue = dispatcher, client, plan, queue
        self._moved, self._moved_done = time.monotonic(), -1
        self._counted_s = float("-inf")
        self._workers = self._waiting = 0
        self._bad_seen = 0
        self._bad_reported: set[str] = set()
        self._told_of_more = False

    def explained(
        self, progress: ProductionProgress, stream: Stream, unfinished: Iterable[str], held_back: str
    ) -> ProductionProgress:
        """Return the progress with its details. ``unfinished``: ids of jobs; ``held_back`` says why there are none."""
        now = time.monotonic()
        if progress.done != self._moved_done:
            self._moved, self._moved_done = now, progress.done
        if now - self._counted_s >= COUNT_S:
            self._counted_s = now
            self._workers = self._dispatcher.count_workers()
            self._waiting = sum(len(load_roster(self._client, each).waiting) for each in stream.partitions)
        waits, is_wait = "", True
        if now - self._moved >= STALL_S:
            jobs = list(islice(unfinished, ASKED))
            if told := self._dispatcher.reports(jobs).waits if jobs else "":
                waits, is_wait = told.removeprefix(WAITING), told.startswith(WAITING)
            else:
                waits = self._why_still(jobs, bool(progress.pids)) if jobs else held_back
        new_bad = self._new_bad(progress, stream)
        return replace(
            progress, waits=waits, is_wait=is_wait, new_bad=new_bad, more_bad=self._more_bad(progress),
            workers=self._workers, waiting=self._waiting,
        )  # fmt: skip

    def _new_bad(self, progress: ProductionProgress, stream: Stream) -> tuple[str, ...]:
        before, self._bad_seen = self._bad_seen, progress.bad
        if progress.bad <= before or len(self._bad_reported) >= SHOWN_BAD:  # a server may have lost some
            return ()
        newest = max(seen.epoch for seen in progress.epochs if seen.bad)
        reasons = bad_reasons(self._client, stream, newest, SHOWN_BAD)
        new = tuple(reason for reason in reasons if reason not in self._bad_reported)
        self._bad_reported.update(new)
        return new

    def _more_bad(self, progress: ProductionProgress) -> str:
        if self._told_of_more or progress.bad <= len(self._bad_reported):
            return ""
        self._told_of_more = True
        return bad_command(self._plan.stream)

    def _why_still(self, jobs: Sequence[str], has_workers: bool) -> str:
        if self._dispatcher.count_workers():
            reports, running = self._dispatcher.reports(jobs), self._dispatcher.running()
            # a job that failed is still in its worker's hand while that pauses
            if error := reports.failing if running else reports.error:
                return f"a shard is tried again: {printable(error[:SHOWN_ERROR])}"
            if not running:
                return "no worker of this queue has taken one of its jobs: see what the workers say"
            if silent := self._dispatcher.silent(jobs):
                shards = ", ".join(job_id.rpartition("-")[2] for job_id in silent[:SHOWN_SHARDS])
                return (
                    f"no heartbeat came from the worker of shard{'s' if len(silent) > 1 else ''} {shards} for "
                    f"{WORKER_SILENCE_S:.0f} s (was it killed?). After {HEARTBEAT_TTL_S} s another one takes its work"
                )
            busy = not running.isdisjoint(jobs)
            return "" if busy else "all workers are busy with other jobs of this queue (--queue keeps them apart)"
        return "its own workers are starting" if has_workers else f"no worker takes jobs: {self._remedy}"

    @cached_property
    def _remedy(self) -> str:
        try:
            return f"start `{worker_command(self._plan.source, self._plan.block_transform, self._queue)}`"
        except NotAllowed as error:
            return str(error)
