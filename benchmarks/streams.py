"""A stream's keys as a benchmark reads and writes them, by docs/redis-keys.md alone."""

from __future__ import annotations

import json
from typing import Any

import redis


def rosters(client: Any, stream: str) -> list[dict[str, str]]:
    """Return the roster of each partition, or none while there is no such stream."""
    tags = json.loads(client.hget(f"penstock:{{{stream}}}:meta", "tags") or "[]")
    found = [client.hgetall(f"penstock:{{{stream}.{tag}}}:roster") for tag in tags]
    return [{field.decode(): value.decode() for field, value in roster.items()} for roster in found]


def paces(client: Any, stream: str) -> dict[str, int]:
    """Count the processes that report a rate: ``w`` workers, ``t`` members."""
    fields = [field.decode() for field in client.hkeys(f"penstock:{{{stream}}}:paces")]
    return {kind: sum(field.startswith(f"{kind}:") for field in fields) for kind in ("w", "t")}


def expect_epochs(url: str, stream: str, count: int | None) -> None:
    """Set the number of epochs that the stream will have. None is unknown, so trainers wait for more."""
    with redis.Redis.from_url(url) as client:
        meta = f"penstock:{{{stream}}}:meta"
        if count is None:
            client.hdel(meta, "final")
        else:
            client.hset(meta, "final", count)
        client.xadd(f"penstock:{{{stream}}}:events", {"plan": str(count)}, maxlen=256, nomkstream=True)
