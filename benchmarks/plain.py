"""The baseline: the same job as one would write it well with redis-py and hiredis, and nothing guaranteed.

Packed into blocks as large as Penstock's, pipelined, read by a group in blocks, copied into batch arrays, acknowledged
and deleted; a bound on the stream's length instead of a byte budget. No checksums, no exactly-once, no ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import redis

from benchmarks.cases import ROWS, Case

KEY, GROUP = "plain", "bench"
BLOCK_BYTES = 512_000
AHEAD_BYTES = 256 << 20


def prepare(url: str, case: Case) -> None:
    """Makes stream and group before the clock starts."""
    redis.Redis.from_url(url).xgroup_create(KEY, GROUP, "0", mkstream=True)


def write(url: str, case: Case) -> None:
    """The writer's process."""
    client = redis.Redis.from_url(url)
    per_block = max(1, BLOCK_BYTES // case.sample_bytes)
    most = max(4, AHEAD_BYTES // (per_block * case.sample_bytes))
    pipe = client.pipeline(transaction=False)
    for count, data in enumerate(_payloads(case, per_block)):
        pipe.xadd(KEY, {"n": len(data) // case.sample_bytes, "x": data})
        if len(pipe) == 4:
            pipe.execute()
            while count % 64 < 4 and client.xlen(KEY) > most:
                pass
    pipe.xadd(KEY, {"n": 0, "x": b""})
    pipe.execute()


def _payloads(case: Case, per_block: int) -> Iterator[bytes]:
    if case.by_batch:
        for rows in case.writes():
            for start in range(0, ROWS, per_block):
                yield rows[start : start + per_block].tobytes()
        return
    parts: list[bytes] = []
    for sample in case.writes():
        parts.append(sample.tobytes())
        if len(parts) == per_block:
            yield parts[0] if per_block == 1 else b"".join(parts)
            parts = []
    if parts:
        yield b"".join(parts)


def read(url: str, case: Case) -> int:
    """The reader's process; returns the samples it got in batches."""
    client: Any = redis.Redis.from_url(url)
    batch = np.empty((case.batch_size, *case.shape), case.dtype)
    filled = seen = 0
    while True:
        reply = client.xreadgroup(GROUP, "reader", {KEY: ">"}, count=4, block=1000)
        ids = []
        for entry_id, fields in reply[0][1] if reply else ():
            ids.append(entry_id)
            count = int(fields[b"n"])
            if count == 0:
                client.xack(KEY, GROUP, *ids)
                return seen
            rows = np.frombuffer(fields[b"x"], case.dtype).reshape(count, *case.shape)
            start = 0
            while start < count:
                taken = min(count - start, case.batch_size - filled)
                batch[filled : filled + taken] = rows[start : start + taken]
                start, filled = start + taken, filled + taken
                if filled == case.batch_size:
                    seen += filled
                    filled = 0
                    batch = np.empty_like(batch)
        if ids:
            pipe = client.pipeline(transaction=False)
            pipe.xack(KEY, GROUP, *ids)
            pipe.xdel(KEY, *ids)
            pipe.execute()
