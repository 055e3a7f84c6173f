"""tensorcom 0.1.0. Modes: ``pushpull`` (trainers share the samples) and ``pubsub`` (each trainer sees them all).

The producer binds and trainers connect, over IPC. ZeroMQ's queues get half of the space at either end. A restarted
producer cannot learn how far the earlier one came.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from benchmarks.peers.protocol import Job, Report, run, sample

zmq: Any = importlib.import_module("zmq")
tensorcom: Any = importlib.import_module("tensorcom")
KINDS = {
    ("pushpull", "produce"): (zmq.PUSH, "zrpush"),
    ("pushpull", "read"): (zmq.PULL, "zrpull"),
    ("pubsub", "produce"): (zmq.PUB, "zpub"),
    ("pubsub", "read"): (zmq.SUB, "zsub"),
}
SETTLE_S = 1.0
"""The pause for trainers to connect, because a trainer misses what was published before."""


def connection(job: Job) -> Any:
    """Return a connection with queues of half the space each.

    tensorcom itself leaves ZeroMQ's default of 1,000 messages.
    """
    kind, scheme = KINDS[job.mode, job.role]
    found = tensorcom.Connection()
    found.socket = found.context.socket(kind)
    found.socket.setsockopt(zmq.SNDHWM, job.room // 2)
    found.socket.setsockopt(zmq.RCVHWM, job.room // 2)
    found.connect(f"{scheme}+ipc://{job.place}")
    return found


def produce(job: Job, report: Report) -> None:
    """Produce from the beginning, and then wait to be ended, because closing drops the queue (LINGER 0)."""
    to = connection(job)
    time.sleep(SETTLE_S)
    for number in range(job.samples):
        time.sleep(job.make_s)
        to.send([sample(number)])
    report.say("made")
    time.sleep(3600)


def read(job: Job, report: Report) -> None:
    """Read until killed."""
    rows: list[Any] = []
    for (row,) in connection(job):
        rows.append(row)
        if len(rows) == job.batch:
            report.step(np.stack(rows), job.step_s)
            rows = []
            if report.is_checkpoint_due(job):
                report.say("checkpoint", state={})


if __name__ == "__main__":
    run({"produce": produce, "read": read})
