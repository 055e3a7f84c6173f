"""A Redis stream as some training code uses it today: COUNT 1, NOACK, pickle, MAXLEN.

Each sample is a separate, pickled entry, and reading it is the only record. A restarted producer cannot learn how far
the earlier one came, so it begins again. The stream's bound drops what the slowest reader has not read.
"""

from __future__ import annotations

import importlib
import pickle
import time
from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.peers.protocol import Job, Report, run, sample

redis: Any = importlib.import_module("redis")
KEY = "noack"


def produce(job: Job, report: Report) -> None:
    """Produce from the beginning."""
    client = redis.Redis.from_url(job.place)
    for number in range(job.samples):
        time.sleep(job.make_s)
        client.xadd(KEY, {"data": pickle.dumps(sample(number))}, maxlen=job.room, approximate=False)


def read(job: Job, report: Report) -> None:
    """Read until killed. Only the group's cursor on the server is kept."""
    client = redis.Redis.from_url(job.place)
    with suppress(redis.ResponseError):
        client.xgroup_create(KEY, job.group, "0", mkstream=True)
    rows: list[Any] = []
    while True:
        reply = client.xreadgroup(job.group, job.member, {KEY: ">"}, count=1, block=500, noack=True)
        rows += [pickle.loads(fields[b"data"]) for _, entries in reply for _, fields in entries]  # noqa: S301
        if len(rows) == job.batch or (rows and not reply):
            report.step(np.stack(rows), job.step_s)
            rows = []
            if report.is_checkpoint_due(job):
                report.say("checkpoint", state={})


if __name__ == "__main__":
    run({"produce": produce, "read": read})
