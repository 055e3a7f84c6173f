"""tensorcom 0.1.0. Modes: ``pushpull`` (trainers share the samples) and ``pubsub`` (each trainer sees them all).

The producer binds, trainers connect, over IPC; ZeroMQ's queues get half the room at either end. Nothing tells a
producer how far the one before it came.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from benchmarks.peers.protocol import Job, Report, begin, sample

zmq: Any = importlib.import_module("zmq")
tensorcom: Any = importlib.import_module("tensorcom")
KINDS = {
    ("pushpull", "produce"): (zmq.PUSH, "zrpush"),
    ("pushpull", "read"): (zmq.PULL, "zrpull"),
    ("pubsub", "produce"): (zmq.PUB, "zpub"),
    ("pubsub", "read"): (zmq.SUB, "zsub"),
}
SETTLE_S = 1.0
"""For trainers to connect: what is published before is nobody's."""


def connection(job: Job) -> Any:
    """With queues of half the room each: tensorcom itself leaves ZeroMQ's default of 1,000 messages."""
    kind, scheme = KINDS[job.mode, job.role]
    found = tensorcom.Connection()
    found.socket = found.context.socket(kind)
    found.socket.setsockopt(zmq.SNDHWM, job.room // 2)
    found.socket.setsockopt(zmq.RCVHWM, job.room // 2)
    found.connect(f"{scheme}+ipc://{job.place}")
    return found


def produce(job: Job, report: Report) -> None:
    """From the beginning; then waits to be ended, because closing drops what is queued (LINGER 0)."""
    to = connection(job)
    time.sleep(SETTLE_S)
    for number in range(job.samples):
        time.sleep(job.make_s)
        to.send([sample(number)])
    report.say("made")
    time.sleep(3600)


def read(job: Job, report: Report) -> None:
    """Until killed."""
    rows: list[Any] = []
    for (row,) in connection(job):
        rows.append(row)
        if len(rows) == job.batch:
            report.step(np.stack(rows), job.step_s)
            rows = []
            if report.is_checkpoint_due(job):
                report.say("checkpoint", state={})


def main() -> None:
    """A child process."""
    job, report = begin()
    report.say("ready")
    {"produce": produce, "read": read}[job.role](job, report)


if __name__ == "__main__":
    main()
