"""Reads an epoch back by its shard indexes, as the audit would, and insists that every offset is there once."""

from __future__ import annotations

from typing import Any

import redis

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_records
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.streams import load_stream
from penstock_common.wire.codec import decode


def read_epoch(url: str, stream_name: str = "train", epoch: int = 0) -> dict[tuple[int, int], dict[str, Any]]:
    """(shard, offset) -> sample, of all that are there; the index has no gap and no entry is without record."""
    with redis.Redis.from_url(url) as client:
        stream = load_stream(client, stream_name)
        manifest = load_manifest(client, stream, epoch)
        assert manifest.state == "produced"
        assert manifest.sizes is not None
        assert stream.spec is not None
        found: dict[tuple[int, int], dict[str, Any]] = {}
        entries = 0
        for shard, size in enumerate(manifest.sizes):
            partition, end = stream.partition_of(shard), 0
            for record in index_records(client, partition, epoch, shard):
                assert record.first == end
                end = record.end
                if record.entry_id:
                    entries += 1
                    ((_, fields),) = client.xrange(partition.entries(epoch), record.entry_id, record.entry_id)
                    header, block = decode(list(fields.items()), stream.spec)
                    assert (header.epoch, header.shard, header.first) == (epoch, shard, record.first)
                    for row, offset in enumerate(block.offsets()):
                        found[shard, int(offset)] = {c.spec.name: c.values[row] for c in block.columns}
            assert end == size
        assert entries == sum(client.xlen(partition.entries(epoch)) for partition in stream.partitions)
        return found


def bad_count(client: Client, stream_name: str = "train", epoch: int = 0) -> int:
    """Quarantined samples."""
    stream = load_stream(client, stream_name)
    return sum(int(client.hlen(partition.quarantine(epoch))) for partition in stream.partitions)
