"""A reader of a stream's epoch written from docs/wire-format.md and docs/redis-keys.md alone; nothing of Penstock.

It proves that the two pages suffice. Keep it so: when it must change, the pages must have changed first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import redis

from tests.common.wire import independent

Identity = tuple[int, int]
"""An identity: (shard, offset)."""


def hash_of(client: redis.Redis, key: str) -> dict[bytes, bytes]:
    """Return all fields of a hash."""
    reply: Any = client.hgetall(key)
    return dict(reply)


class IndependentReader:
    """A reader of one epoch through the shard indexes, as redis-keys.md says under "To read an epoch"."""

    def __init__(self, client: redis.Redis, stream: str, epoch: int) -> None:
        self._client, self._stream, self._epoch = client, stream, epoch
        meta = hash_of(client, f"penstock:{{{stream}}}:meta")
        self._id, self._spec = meta[b"id"].decode(), json.loads(meta[b"spec"])
        self._tags: list[str] = json.loads(meta[b"tags"])
        manifest = hash_of(client, f"penstock:{{{stream}}}:{epoch}:manifest")
        assert manifest[b"state"] == b"produced"
        self._is_feed = manifest[b"kind"] == b"feed"
        self._taken = {field[2:]: int(shard) for field, shard in manifest.items() if field.startswith(b"w:")}
        self._sizes: list[int] = json.loads(manifest[b"sizes"])

    def samples(self) -> Iterator[tuple[Identity, dict[str, independent.Tensor]]]:
        """Return every sample in canonical order."""
        for shard, size in enumerate(self._sizes):
            prefix = f"penstock:{{{self._stream}.{self._tags[shard % len(self._tags)]}}}:{self._epoch}"
            at = 0
            for end, record in self._records(f"{prefix}:{shard}:index"):
                holes = json.loads(record[b"h"])
                assert (int(record[b"f"]), at + int(record[b"n"]) + len(holes)) == (at, end)
                at = end
                assert self._taken[record[b"w"]] == shard if self._is_feed else b"w" not in record
                if record[b"e"]:
                    yield from self._block(f"{prefix}:entries", shard, record)
            assert at == size

    def _records(self, key: str) -> Iterator[tuple[int, dict[bytes, bytes]]]:
        records: Any = self._client.xrange(key)
        for record_id, fields in records:
            yield int(record_id.split(b"-")[0]), fields

    def _block(
        self, key: str, shard: int, record: dict[bytes, bytes]
    ) -> Iterator[tuple[Identity, dict[str, independent.Tensor]]]:
        found: Any = self._client.xrange(key, record[b"e"], record[b"e"])
        ((_, fields),) = found
        entry = independent.read(list(fields.items()), self._spec)
        header = entry.header
        assert (header["stream"], header["epoch"], header["shard"]) == (self._id, self._epoch, shard)
        assert (header["first"], header["count"]) == (int(record[b"f"]), int(record[b"n"]))
        for offset, sample in zip(entry.offsets, entry.samples, strict=True):
            yield (shard, offset), sample


def quarantined(client: redis.Redis, stream: str, epoch: int) -> dict[Identity, str]:
    """Return identity -> the reason why the sample could not be made."""
    tags = json.loads(hash_of(client, f"penstock:{{{stream}}}:meta")[b"tags"])
    found: dict[Identity, str] = {}
    for tag in tags:
        for place, why in hash_of(client, f"penstock:{{{stream}.{tag}}}:{epoch}:quarantine").items():
            shard, offset = place.decode().split(":")
            found[int(shard), int(offset)] = json.loads(why)["why"]
    return found
