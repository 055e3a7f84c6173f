"""The baseline: the same work, well written with redis-py and hiredis, without guarantees.

Samples are packed into blocks, pipelined, read by a group in blocks, copied into batch arrays, acknowledged and
deleted. There is a bound on the stream's length instead of a byte budget. There are no checksums, no exactly-once and
no ledger.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import redis

from benchmarks.transports.protocol import ROWS, Load, Turns, run

KEY, GROUP = "plain", "bench"
BLOCK_BYTES = 512_000
"""The fastest size here. A sample that is larger is a separate block."""
REQUEST_BYTES = 2_000_000
"""The bytes that are sent, or requested, at once, which hides a round trip."""


def write(load: Load, turns: Turns) -> None:
    """Write in pipelines, up to the bound on the stream's length."""
    client = redis.Redis.from_url(load.place)
    per_block = max(1, BLOCK_BYTES // load.sample_bytes)
    block_bytes = per_block * load.sample_bytes
    most, at_once = max(2, load.room_bytes // block_bytes), max(1, REQUEST_BYTES // block_bytes)
    check_every = max(1, most // 8)
    for samples in turns:
        pipe: Any = client.pipeline(transaction=False)
        for count, data in enumerate(_blocks(load, samples, per_block)):
            pipe.xadd(KEY, {"n": len(data) // load.sample_bytes, "x": data})
            if len(pipe) == at_once:
                pipe.execute()
            if count % check_every == 0:
                while client.xlen(KEY) > most:
                    time.sleep(0.0005)
        pipe.execute()


def _blocks(load: Load, samples: int, per_block: int) -> Iterator[bytes]:
    if load.by_batch:
        for rows in load.batches(samples, ROWS):
            for start in range(0, ROWS, per_block):
                yield rows[start : start + per_block].tobytes()
        return
    parts: list[bytes] = []
    for sample in load.samples(samples):
        parts.append(sample.tobytes())
        if len(parts) == per_block:
            yield parts[0] if per_block == 1 else b"".join(parts)
            parts = []
    if parts:
        yield b"".join(parts)


def read(load: Load, turns: Turns) -> None:
    """Read blocks into batches in the trainer's own memory."""
    client: Any = redis.Redis.from_url(load.place)
    client.xgroup_create(KEY, GROUP, "0", mkstream=True)
    at_once = max(1, REQUEST_BYTES // max(BLOCK_BYTES, load.sample_bytes))
    for samples in turns:
        batch, filled = np.empty((load.batch, *load.shape), load.dtype), 0
        while turns.samples < samples:
            reply = client.xreadgroup(GROUP, "reader", {KEY: ">"}, count=at_once, block=1000)
            ids = []
            for entry_id, fields in reply[0][1] if reply else ():
                ids.append(entry_id)
                count = int(fields[b"n"])
                rows = np.frombuffer(fields[b"x"], load.dtype).reshape(count, *load.shape)
                start = 0
                while start < count:
                    taken = min(count - start, load.batch - filled)
                    batch[filled : filled + taken] = rows[start : start + taken]
                    start, filled = start + taken, filled + taken
                    if filled == load.batch:
                        turns.got(batch)
                        batch, filled = np.empty_like(batch), 0
            if ids:
                pipe = client.pipeline(transaction=False)
                pipe.xack(KEY, GROUP, *ids)
                pipe.xdel(KEY, *ids)
                pipe.execute()


if __name__ == "__main__":
    run({"write": write, "read": read})
