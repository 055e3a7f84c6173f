"""Streams for the audit to examine, and ways to damage them."""

from __future__ import annotations

from typing import Any

import numpy as np
import redis

from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_common.wire.spec import Spec
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import EpochWriter, Writer

SPEC = Spec.of({"x": ("uint8", (1000,)), "tag": ("bytes", ())})
PER_ENTRY = 8
Fields = dict[bytes, bytes]


def sample(number: int) -> dict[str, object]:
    """Return a sample."""
    return {"x": np.full(1000, number % 251, dtype=np.uint8), "tag": b""}


def writer(url: str, partitions: int = 1, budget_bytes: int | None = None) -> Writer:
    """Return a writer that packs `PER_ENTRY` samples into each entry."""
    return Writer(
        "train",
        url=url,
        spec=SPEC,
        tuning=Tuning(block_bytes=1000 * PER_ENTRY),
        partitions=partitions,
        budget_bytes=budget_bytes,
    )


def fill(url: str, sizes: tuple[int, ...] = (40, 24), partitions: int = 1, bad: tuple[int, ...] = (3,)) -> None:
    """Produce one epoch. The offsets ``bad`` of its first shard are holes."""
    with writer(url, partitions) as made, made.epoch(sizes=sizes) as epoch:
        for shard, size in enumerate(sizes):
            with epoch.shard(shard) as part:
                for offset in range(size):
                    if shard == 0 and offset in bad:
                        part.quarantine("truncated")
                    else:
                        part.write(sample(offset))


def train(url: str, group: str = "resnet") -> int:
    """Read the group's next epoch to its end."""
    with Loader("train", group=group, batch_size=10, url=url) as loader:
        return sum(batch.size for batch in loader)


def audited(url: str, *, deep: bool = False) -> AuditReport:
    """Return the audit of the stream."""
    with connect(url) as client:
        return audit_stream(client, "train", deep=deep)


def partition_of(client: redis.Redis, number: int = 0) -> PartitionKeys:
    """Return the partition that holds the entries."""
    return load_stream(client, "train").partitions[number]


def everything(client: redis.Redis, key: str) -> list[tuple[bytes, Fields]]:
    """Return all keys of a stream with their values."""
    found: Any = client.xrange(key)
    return list(found)


def entry_of(client: redis.Redis, position: int, epoch: int = 0) -> tuple[bytes, Fields]:
    """Return an entry by its position in partition 0."""
    return everything(client, partition_of(client).entries(epoch))[position]


def append(client: redis.Redis, fields: Fields) -> bytes:
    """Append an entry by XADD, as no producer does, and return its id."""
    made: bytes = client.execute_command(
        "XADD", partition_of(client).entries(0), "*", *(part for field in fields.items() for part in field)
    )
    return made


def rewrite_index(client: redis.Redis, shard: int, change: dict[int, tuple[bytes, bytes]]) -> None:
    """Replace field values of a shard's index records, by end offset. Other fields stay."""
    key = partition_of(client).index(0, shard)
    records = everything(client, key)
    client.delete(key)
    for record_id, fields in records:
        end = int(record_id.split(b"-")[0])
        changed = {**fields, **dict([change[end]] if end in change else [])}
        client.execute_command("XADD", key, record_id, *(part for field in changed.items() for part in field))


def the_finding(report: AuditReport, *words: str) -> str:
    """Return the only finding, which must have all the words."""
    assert len(report.findings) == 1, report.findings
    assert not report.is_clean
    assert [word for word in words if word not in report.findings[0]] == [], report.findings[0]
    return report.findings[0]


def unfinished(made: Writer, count: int = 40) -> EpochWriter:
    """Open an epoch with some samples committed and more to come."""
    epoch = made.epoch()
    for number in range(count):
        epoch.write(sample(number))
    epoch.flush()
    return epoch
