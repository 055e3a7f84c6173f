"""A Redis stream as some training code uses it today: COUNT 1, NOACK, pickle, MAXLEN.

Each sample is a separate, pickled entry, sent and requested one at a time. The stream's bound drops what a slow reader
has not read, so a turn is over when nothing has come for a while.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import redis

from benchmarks.transports.protocol import ROWS, Load, Turns, run

KEY, GROUP = "noack", "bench"
SILENCE_MS = 1000


def write(load: Load, turns: Turns) -> None:
    """Write samples one at a time, even if the writer has many at once, because the pattern has no blocks."""
    client = redis.Redis.from_url(load.place)
    room = max(2, load.room_bytes // load.sample_bytes)
    for samples in turns:
        for rows in load.batches(samples, ROWS) if load.by_batch else load.samples(samples):
            for sample in rows if load.by_batch else (rows,):
                client.xadd(KEY, {"data": pickle.dumps(sample)}, maxlen=room, approximate=True)


def read(load: Load, turns: Turns) -> None:
    """Read the turn's samples. Only the group's cursor on the server is kept."""
    client: Any = redis.Redis.from_url(load.place)
    client.xgroup_create(KEY, GROUP, "0", mkstream=True)
    for samples in turns:
        rows: list[Any] = []
        while turns.samples < samples:
            reply = client.xreadgroup(GROUP, "reader", {KEY: ">"}, count=1, block=SILENCE_MS, noack=True)
            if not reply and turns.samples:
                break
            rows += [pickle.loads(fields[b"data"]) for _, entries in reply for _, fields in entries]  # noqa: S301
            if len(rows) == load.batch:
                turns.got(np.stack(rows))
                rows = []


if __name__ == "__main__":
    run({"write": write, "read": read})
