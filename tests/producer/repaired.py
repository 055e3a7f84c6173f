"""Epochs made from a source in this process, and damage to them: what the tests of repairs begin with."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import redis

from penstock_common.errors import SampleError
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.streams import Stream, load_stream
from penstock_common.tuning import Tuning
from penstock_producer.jobs.fill import EpochSeed, FailureLimit, fill_batches, fill_samples
from penstock_producer.jobs.plan import EpochOrder, plan_fingerprint
from penstock_producer.jobs.repair import RepairResult, repair_epoch
from penstock_producer.write.writer import Writer

SAMPLES, SHARD, BLOCK = 90, 40, 7
SEED = 5
SPEC = {"x": ("int64", (2,)), "noise": ("float32", ()), "tag": ("bytes", ())}
BAD = (13, 57)
"""Items that cannot be made."""


class Numbers:
    """Samples by index; each has noise of its own generator, so that only the right one makes it again."""

    unit: Any = "sample"
    repeatable = True
    info: ClassVar[dict[str, Any]] = {}
    spec = None

    def __init__(self, fingerprint: str = "numbers", count: int = SAMPLES) -> None:
        self.fingerprint, self._count = fingerprint, count
        self.reads: list[int] = []
        self.broken: set[int] = set(BAD)

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        """One sample."""
        self.reads.append(index)
        if index in self.broken:
            raise SampleError(f"numbers[{index}] is broken")
        return {"x": [index, -index], "noise": np.float32(rng.random()), "tag": b"t" * (index % 5)}

    def key(self, index: int) -> str:
        """Its name."""
        return f"numbers[{index}]"

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class Pages(Numbers):
    """The numbers of ``Numbers``, ten at a time."""

    unit: Any = "batch"

    def __len__(self) -> int:
        return self._count // 10

    def size(self, item: int) -> int:
        """Samples of an item."""
        return 10

    def read(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        """One batch."""
        self.reads.append(index)
        if index == 4:
            raise SampleError("pages[4] is broken")
        numbers = np.arange(10) + 10 * index
        noise = rng.random(10).astype(np.float32)
        return {"x": np.stack([numbers, -numbers], 1), "noise": noise, "tag": [b"t" * (n % 5) for n in numbers]}


def produce(
    url: str, source: Any = None, *, partitions: int = 1, shuffle: bool = True, compression: str | None = None
) -> None:
    """One epoch of the source, as jobs make it."""
    source = source or Numbers()
    tuning = Tuning(block_bytes=BLOCK * 22, compression=compression, notify=lambda _: None)
    with Writer("t", url=url, spec=SPEC, partitions=partitions, tuning=tuning) as writer:
        order = EpochOrder(source, seed=SEED, epoch=0, shuffle=shuffle, shard_samples=SHARD)
        fingerprint = plan_fingerprint(source.fingerprint, shuffle)
        epoch = writer.epoch(0, seed=SEED, sizes=order.sizes, fingerprint=fingerprint)
        fill: Any = fill_batches if source.unit == "batch" else fill_samples
        for shard in range(len(order.sizes)):
            with epoch.shard(shard) as part:
                fill(source, order.items(shard), part, shard, EpochSeed(SEED, 0), FailureLimit(lambda: False))


def repair(url: str, source: Any = None, said: list[str] | None = None, *, deep: bool = False) -> RepairResult:
    """Repairs epoch 0."""
    with connect(url) as client:
        return repair_epoch(
            client, load_stream(client, "t"), 0, source or Numbers(), deep=deep,
            notify=(said if said is not None else []).append,
        )  # fmt: skip


def audit(url: str, *, deep: bool = True) -> AuditReport:
    """The stream's audit."""
    with connect(url) as client:
        return audit_stream(client, "t", deep=deep)


def stream_of(client: redis.Redis) -> Stream:
    """Its keys."""
    return load_stream(client, "t")


def records(client: redis.Redis, shard: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the shard's index from the server."""
    found: Any = client.xrange(stream_of(client).partition_of(shard).index(0, shard))
    return list(found)


def lose_entry(client: redis.Redis, shard: int, position: int) -> range:
    """Deletes the entry of a shard's index record; the offsets it held."""
    record_id, fields = records(client, shard)[position]
    assert client.xdel(stream_of(client).partition_of(shard).entries(0), fields[b"e"])
    return range(int(fields[b"f"]), int(record_id.split(b"-")[0]))


def damage_entry(client: redis.Redis, shard: int, position: int, name: bytes = b"x") -> range:
    """Flips a bit in a field of the entry of a shard's index record, as broken memory would; the offsets it holds.

    Redis changes no entry, so a damaged copy takes its place, and the index is written again.
    """
    partition, kept = stream_of(client).partition_of(shard), records(client, shard)
    found: Any = client.xrange(partition.entries(0), kept[position][1][b"e"], kept[position][1][b"e"])
    entry = {**found[0][1], name: bytes([found[0][1][name][0] ^ 1]) + found[0][1][name][1:]}
    client.xdel(partition.entries(0), found[0][0])
    made: Any = client.xadd(partition.entries(0), entry)
    kept[position][1][b"e"] = made
    client.delete(partition.index(0, shard))
    for record_id, fields in kept:
        client.execute_command("XADD", partition.index(0, shard), record_id, *(p for f in fields.items() for p in f))
    return range(int(kept[position][1][b"f"]), int(kept[position][0].split(b"-")[0]))


def lose_record(client: redis.Redis, shard: int, position: int) -> None:
    """Deletes a record of a shard's index."""
    record_id, _ = records(client, shard)[position]
    assert client.xdel(stream_of(client).partition_of(shard).index(0, shard), record_id)


def lose_tail(client: redis.Redis, shard: int, count: int) -> None:
    """The last blocks of a shard, entries and records: what a failover to a stale replica leaves under a manifest that
    says done. An index's last id would stay with XDEL, so the index is written again.
    """
    partition = stream_of(client).partition_of(shard)
    kept = records(client, shard)
    for _, fields in kept[-count:]:
        client.xdel(partition.entries(0), fields[b"e"])
    client.delete(partition.index(0, shard))
    for record_id, fields in kept[:-count]:
        client.execute_command("XADD", partition.index(0, shard), record_id, *(p for f in fields.items() for p in f))
