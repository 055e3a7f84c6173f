"""What a worker uses beyond decode and transform: shards of jobs, and as many samples by a bare loop, in turns.

Both in one process that allocates alike, half a second each: what else the machine does meets both. The worker's side
is all of its work on a job: the queue's bookkeeping, order and seeds, blocks, checksums, commits, heartbeats.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.loading_sides import SPEC, STREAM
from benchmarks.photographs import photographs
from benchmarks.trainers import QUIET, in_clean_process, own_seconds


@dataclass(frozen=True)
class Paid:
    """CPU milliseconds a sample, of one epoch each."""

    ours: float
    bare: float

    @property
    def tax(self) -> float:
        """The share that is ours."""
        return self.ours / self.bare - 1


def pay(payload: str) -> Paid:
    """One epoch, with the payloads there."""
    found: Paid = in_clean_process(_pay, payload)
    return found


def _pay(payload: str) -> Paid:
    from penstock_common.stream.servers.embedded import EmbeddedServer
    from penstock_producer.planning.plan import ProductionPlan
    from penstock_producer.planning.production import Production
    from penstock_producer.sources.config import DatasetConfig
    from penstock_producer.working.memory import keep_freed
    from penstock_producer.working.worker import WorkerOptions
    from penstock_producer.writing.writer import Writer

    keep_freed()
    with EmbeddedServer() as server:
        with Writer(STREAM, url=server.url, spec=SPEC, payload=payload, **QUIET):
            pass
        options = WorkerOptions(server.url, server.url, name="taxed", owner=os.getpid())
        source = DatasetConfig(name="benchmarks.photographs:photographs")
        with Production(ProductionPlan(stream=STREAM, source=source), options, workers=0, **QUIET) as production:
            run = production.run()
            next(run)  # jobs are queued
            paid = _in_turns(options)
            for _ in run:
                pass
        return paid


def _in_turns(options: Any) -> Paid:
    worker = _worker(options)
    data, rng = photographs(), np.random.default_rng(1)
    ours = bare = 0.0
    made = -1
    while (found := worker.dequeue_job_and_maintain_ttl(None)) is not None:
        began = own_seconds()
        worker.execute_job(*found)
        between = own_seconds()
        count = found[0].return_value()["good"]
        for index in rng.integers(len(data), size=count).tolist():
            data[index]
        ended = own_seconds()
        if made < 0:  # the first shard opens connections and files
            made = 0
            continue
        made, ours, bare = made + count, ours + between - began, bare + ended - between
    return Paid(1000 * ours / made, 1000 * bare / made)


def _worker(options: Any) -> Any:
    from penstock_common.stream.link.connection import connect
    from penstock_producer.working.jobs import set_workbench
    from penstock_producer.working.paced import PacedBench
    from penstock_producer.working.worker import ShardWorker, open_queue

    bench = PacedBench(options.url, options.name)
    set_workbench(bench)
    worker: Any = ShardWorker(open_queue(connect(options.queue_url), options.queue), options, threading.Event())
    worker.register_birth()
    return worker
