"""Read the keys of a run from Redis by docs/redis-keys.md alone, without any Penstock code under test."""

from __future__ import annotations

import json
from typing import Any

import redis
from redis.exceptions import ClusterError, RedisClusterException

AWAY = (redis.ConnectionError, redis.TimeoutError, ClusterError, RedisClusterException)
"""The errors of redis-py while no server answers, while the server loads its file, or while a slot has no master."""
PRODUCED, ABANDONED = "produced", "abandoned"


def meta_key(stream: str) -> str:
    """Return the key of the stream's meta."""
    return f"penstock:{{{stream}}}:meta"


def meta(client: Any, stream: str) -> dict[str, str]:
    """Return the fields of the stream's meta."""
    return _hash(client, meta_key(stream))


def partitions(client: Any, stream: str) -> list[str]:
    """Return the prefix of the keys of each partition."""
    return [f"penstock:{{{stream}.{tag}}}" for tag in json.loads(meta(client, stream)["tags"])]


def epochs(client: Any, stream: str) -> dict[int, str]:
    """Return the state of each retained epoch."""
    return {int(epoch): state for epoch, state in _hash(client, f"penstock:{{{stream}}}:epochs").items()}


def rostered(client: Any, partition: str) -> set[int]:
    """Return the epochs that have keys in a partition."""
    return {int(field[2:]) for field in _hash(client, f"{partition}:roster") if field.startswith("e:")}


def settled(client: Any, partition: str, group: str) -> set[int]:
    """Return the epochs that the group has acknowledged in a partition."""
    mark = f"d:{group}:"
    return {int(field.removeprefix(mark)) for field in _hash(client, f"{partition}:roster") if field.startswith(mark)}


def quarantine(client: Any, stream: str, epoch: int) -> set[str]:
    """Return ``shard:offset`` of every sample that could not be made."""
    keys = [f"{partition}:{epoch}:quarantine" for partition in partitions(client, stream)]
    return {field.decode() for key in keys for field in client.hkeys(key)}


def segments(client: Any, partition: str, epoch: int) -> dict[str, int]:
    """Return how many entries each segment of an epoch holds, by the partition's registry."""
    found = _hash(client, f"{partition}:{epoch}:segments")
    return {name: int(count) for name, count in found.items() if not name.startswith("s:")}


def _hash(client: Any, key: str) -> dict[str, str]:
    return {field.decode(): value.decode() for field, value in client.hgetall(key).items()}
