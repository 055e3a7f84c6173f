"""The cost of a worker beyond decode and transform: shards of jobs, and as many samples by a bare loop, in turns.

Both run in one process with the same allocator, a fraction of a second each, so that other load on the machine affects
both. The worker's side is all of its work on a job: the queue's bookkeeping, order and seeds, blocks, checksums,
commits, heartbeats, freeing space. Before the clock starts, the stream has carried its budget a few times, as in a long
run. So its memory exists, in the server or in segments. The cost of allocating it is measured separately.

A part of a worker's extra time is spent in the user's own code, whose caches hold other data. So the time in that code
is measured, too. The time outside of it is Penstock's alone, and a machine whose speed changes from one turn to the
next changes both at once.

It needs an internal part, the worker whose jobs run in turns with the loop, so it measures only its own tree.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.loading_sides import BATCH, BUDGET_BYTES, EARLIER, SPEC, STREAM
from benchmarks.photographs import SIDE, Photographs, photographs
from benchmarks.trainers import QUIET, Trainers, in_clean_process, own_seconds

WORKERS = 2
"""The number of workers for which an epoch is cut."""


@dataclass(frozen=True)
class Paid:
    """CPU milliseconds a sample, of one epoch each."""

    ours: float
    bare: float
    inside: float
    """The part of `ours` in the user's decode and transform."""

    @property
    def tax(self) -> float:
        """Return the extra cost relative to the bare loop."""
        return self.ours / self.bare - 1

    @property
    def outside(self) -> float:
        """Return the cost outside decode and transform, relative to them, in the same process and turn."""
        return self.ours / self.inside - 1


class Clocked(Photographs):
    """Photographs that measure their own time."""

    spent_s = 0.0
    """The total time of the thread that reads them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        began = time.thread_time()
        made = super().__getitem__(index)
        Clocked.spent_s += time.thread_time() - began
        return made


def clocked() -> Clocked:
    """Return all photographs."""
    return Clocked(photographs().paths)


def pay(payload: str, *, is_new: bool = False, of: int = 0) -> Paid:
    """Run one epoch with existing memory for payloads, or with ``is_new`` on a stream that has carried nothing before.

    Shards are as large as in an epoch ``of`` samples. 0 means as many as there are.
    """
    found: Paid = in_clean_process(_pay, (payload, is_new, of))
    return found


def _pay(job: tuple[str, bool, int]) -> Paid:
    from penstock import EmbeddedServer
    from penstock_common.stream.client import connect
    from penstock_common.stream.removal.deletion import delete_stream
    from penstock_producer.jobs.allowlist import ANYTHING
    from penstock_producer.jobs.plan import ProductionPlan, cut, default_shard_samples
    from penstock_producer.jobs.production import Production
    from penstock_producer.jobs.watchdog import keep_freed
    from penstock_producer.jobs.worker import WorkerOptions
    from penstock_producer.sources.config import DatasetConfig

    payload, is_new, of = job
    keep_freed()
    with EmbeddedServer() as server:
        samples = len(clocked())
        shard_samples = default_shard_samples(of or samples, WORKERS)
        begin_stream(server.url, payload, cut(samples, shard_samples), 0 if is_new else EARLIER)
        options = WorkerOptions(server.url, server.url, name="taxed", owner=os.getpid(), allowlist=ANYTHING)
        source = DatasetConfig(name="benchmarks.tax:clocked")
        plan = ProductionPlan(stream=STREAM, source=source, shard_samples=shard_samples)
        with Production(plan, options, workers=0, **QUIET) as production:
            run = production.run()
            next(run)  # jobs are queued
            paid = _in_turns(options)
            for _ in run:
                pass
        client = connect(server.url)
        delete_stream(client, STREAM)  # with its segments
        client.close()
        return paid


def begin_stream(url: str, payload: str, sizes: list[int], earlier: int = EARLIER) -> None:
    """Make a stream to which this process has written ``earlier`` epochs of these shards, all of them read."""
    from penstock import Writer

    reader = Trainers(1, partial(_read, url, earlier))  # forked while there are no threads
    rows: dict[str, Any] = {"x": np.zeros((max(sizes), SIDE, SIDE, 3), np.uint8), "y": np.zeros(max(sizes), np.int64)}
    with Writer(STREAM, url=url, spec=SPEC, payload=payload, budget_bytes=BUDGET_BYTES, **QUIET) as writer:
        for _ in range(earlier):
            reader.begin()
            with writer.epoch(sizes=sizes) as epoch:
                for number, size in enumerate(sizes):
                    with epoch.shard(number) as shard:
                        shard.write_batch({name: values[:size] for name, values in rows.items()})
            reader.end()
    reader.close()


def _read(url: str, epochs: int, _: int) -> Iterator[int]:
    """Read the earlier epochs in a separate process, because a process limits what it keeps mapped."""
    from penstock import Loader

    if not epochs:
        return
    with Loader(STREAM, group="earlier", batch_size=BATCH, url=url, **QUIET) as loader:
        for _ in range(epochs):
            yield sum(len(batch["x"]) for batch in loader)


def _in_turns(options: Any) -> Paid:
    worker, runner = _worker(options)
    data, rng = clocked(), np.random.default_rng(1)
    ours = bare = inside = 0.0
    made = -1
    while (found := worker.dequeue_job_and_maintain_ttl(None)) is not None:
        began, spent_s = own_seconds(), Clocked.spent_s
        worker.execute_job(*found)
        between, spent_s = own_seconds(), Clocked.spent_s - spent_s
        count = found[0].return_value()["good"]
        for index in rng.integers(len(data), size=count).tolist():
            data[index]
        ended = own_seconds()
        if made < 0:  # the first shard opens connections and files
            made = 0
            continue
        made, ours, bare, inside = made + count, ours + between - began, bare + ended - between, inside + spent_s
    runner.leave()
    runner.close()
    return Paid(1000 * ours / made, 1000 * bare / made, 1000 * inside / made)


def _worker(options: Any) -> tuple[Any, Any]:
    """Return a worker and its task runner."""
    from penstock_common.stream.client import connect
    from penstock_producer.jobs.allowlist import ANYTHING
    from penstock_producer.jobs.queue import open_queue, set_task_runner
    from penstock_producer.jobs.task_runner import TaskRunner
    from penstock_producer.jobs.worker import ShardWorker

    runner = TaskRunner(options.url, options.name)
    set_task_runner(runner, ANYTHING.check, options.key)
    worker: Any = ShardWorker(open_queue(connect(options.queue_url), options.queue), options, threading.Event())
    worker.register_birth()
    return worker, runner
