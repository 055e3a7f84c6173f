"""The loop that most people write first: one XADD a sample, one XREADGROUP a batch, XACK and XDEL.

Samples are raw bytes. There is a bound on the stream's length instead of a byte budget.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import redis

from benchmarks.transports.protocol import ROWS, Load, Turns, run

KEY, GROUP = "naive", "bench"


def write(load: Load, turns: Turns) -> None:
    """Write samples one at a time, up to the bound on the stream's length."""
    client = redis.Redis.from_url(load.place)
    most = max(2, load.room_bytes // load.sample_bytes)
    check_every = max(1, most // 8)
    for samples in turns:
        count = 0
        for rows in load.batches(samples, ROWS) if load.by_batch else load.samples(samples):
            for sample in rows if load.by_batch else (rows,):
                client.xadd(KEY, {"x": sample.tobytes()})
                count += 1
                if count % check_every == 0:
                    while client.xlen(KEY) > most:
                        time.sleep(0.0005)


def read(load: Load, turns: Turns) -> None:
    """Read the samples of a batch at once."""
    client: Any = redis.Redis.from_url(load.place)
    client.xgroup_create(KEY, GROUP, "0", mkstream=True)
    for samples in turns:
        rows: list[Any] = []
        while turns.samples < samples:
            reply = client.xreadgroup(GROUP, "reader", {KEY: ">"}, count=load.batch - len(rows), block=1000)
            entries = reply[0][1] if reply else []
            rows += [np.frombuffer(fields[b"x"], load.dtype).reshape(load.shape) for _, fields in entries]
            if entries:
                ids = [entry_id for entry_id, _ in entries]
                client.xack(KEY, GROUP, *ids)
                client.xdel(KEY, *ids)
            if len(rows) == load.batch:
                turns.got(np.stack(rows))
                rows = []


if __name__ == "__main__":
    run({"write": write, "read": read})
