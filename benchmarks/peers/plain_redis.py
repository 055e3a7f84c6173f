"""Redis Streams used well with redis-py and hiredis: groups, XACK after the step, XAUTOCLAIM, a bound.

The producer keeps its progress in a key, set after each block, and waits while the stream is longer than its bound. The
trainer takes its own pending entries first, and then those that are idle for a lease. Nothing is atomic across
commands, and no member renews its entries.
"""

from __future__ import annotations

import importlib
import time
from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.peers.protocol import BLOCK, SAMPLE_BYTES, Job, Report, run, sample

redis: Any = importlib.import_module("redis")
KEY, PROGRESS = "plain", "plain:progress"


def produce(job: Job, report: Report) -> None:
    """Produce from the position in the progress key."""
    client = redis.Redis.from_url(job.place)
    first = int(client.get(PROGRESS) or 0)
    for start in range(first, job.samples, BLOCK):
        rows = []
        for number in range(start, start + BLOCK):
            time.sleep(job.make_s)
            rows.append(sample(number).tobytes())
        while client.xlen(KEY) * BLOCK >= job.room:
            _trim(client)
            time.sleep(0.005)
        client.xadd(KEY, {"x": b"".join(rows)})
        client.set(PROGRESS, start + BLOCK)


def _trim(client: Any) -> None:
    """Trim entries that every group has acknowledged."""
    marks = []
    for group in client.xinfo_groups(KEY) if client.exists(KEY) else ():
        pending = client.xpending(KEY, group["name"])
        marks.append(pending["min"] or _after(group["last-delivered-id"]))
    if marks:
        client.xtrim(KEY, minid=min(marks, key=_order), approximate=False)


def _order(identity: bytes) -> tuple[int, int]:
    ms, seq = identity.split(b"-")
    return int(ms), int(seq)


def _after(identity: bytes) -> bytes:
    ms, seq = _order(identity)
    return b"%d-%d" % (ms, seq + 1)


class Reader:
    """Batches of whole blocks, acknowledged after their step, or with the checkpoint."""

    def __init__(self, job: Job, report: Report) -> None:
        self.job, self.report = job, report
        self.client = redis.Redis.from_url(job.place)
        self.entries: list[tuple[bytes, Any]] = []
        self.owed: list[bytes] = []

    def take(self, entries: Any) -> None:
        """Take entries as they come."""
        for identity, fields in entries:
            if fields:
                self.entries.append((identity, np.frombuffer(fields[b"x"], np.uint8).reshape(-1, SAMPLE_BYTES)))
            if len(self.entries) * BLOCK >= self.job.batch:
                self.step()

    def step(self) -> None:
        """Train on one batch."""
        self.report.step(np.concatenate([rows for _, rows in self.entries]), self.job.step_s)
        self.owed += [identity for identity, _ in self.entries]
        self.entries = []
        if not self.job.checkpoint_every or self.report.is_checkpoint_due(self.job):
            self.client.xack(KEY, self.job.group, *self.owed)
            self.owed = []
            if self.job.checkpoint_every:
                self.report.say("checkpoint", state={})


def read(job: Job, report: Report) -> None:
    """Read until killed, because nothing marks the end of an epoch."""
    reader = Reader(job, report)
    client = reader.client
    with suppress(redis.ResponseError):
        client.xgroup_create(KEY, job.group, "0", mkstream=True)
    for _, entries in client.xreadgroup(job.group, job.member, {KEY: "0"}):
        reader.take(entries)
    looked = time.monotonic()
    while True:
        reply = client.xreadgroup(job.group, job.member, {KEY: ">"}, count=2, block=500)
        for _, entries in reply:
            reader.take(entries)
        if not reply and reader.entries:
            reader.step()
        if time.monotonic() - looked > job.lease_s / 4 and not reader.owed:
            reader.take(client.xautoclaim(KEY, job.group, job.member, int(job.lease_s * 1000), count=2)[1])
            looked = time.monotonic()


if __name__ == "__main__":
    run({"produce": produce, "read": read})
