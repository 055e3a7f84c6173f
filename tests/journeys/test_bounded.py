"""Keys, their sizes, connections, descriptors, threads, memory and names do not grow with the number of epochs."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.events import EVENTS_KEPT
from penstock_common.stream.groups.roster import Membership, join_group, load_roster
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import load_stream, read_counters
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import parse_config
from penstock_producer.write import cleaner
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, numbers, sample, writer_of
from tests.producer import made

SHARDS, SHARD_SAMPLES = 3, 8
EPOCH_BYTES = SHARDS * SHARD_SAMPLES * SAMPLE_BYTES
EARLY, LATE = 40, 200


@dataclass(frozen=True)
class Sizes:
    """The sizes at one moment."""

    keys: int
    key_bytes: int
    kinds: dict[str, int]
    """The number of keys with the same ending, for the message."""
    fields: int
    """The fields of hashes that live as long as the stream."""
    consumers: int
    scripts: int
    connections: int
    descriptors: int
    threads: int
    resident_bytes: int


def measure(client: Client, name: str) -> Sizes:
    """Measure everything that could grow."""
    gc.collect()
    keys: list[bytes] = list(client.scan_iter(match="*", count=1000))
    stream = load_stream(client, name)
    lasting = [stream.keys.meta, stream.keys.epochs, *(partition.roster for partition in stream.partitions)]
    entries = [p.entries(epoch) for epoch in retained_epochs(client, stream) for p in stream.partitions]
    consumers = sum(int(group["consumers"]) for key in entries for group in client.xinfo_groups(key))
    return Sizes(
        keys=len(keys),
        key_bytes=sum(int(client.memory_usage(key, samples=0) or 0) for key in keys),
        kinds=dict(Counter(key.decode().rstrip("0123456789").rpartition(":")[2] or "ledger" for key in keys)),
        fields=sum(int(client.hlen(key)) for key in lasting),
        consumers=consumers,
        scripts=int(client.info("memory")["number_of_cached_scripts"]),
        connections=len(client.client_list()),
        descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        threads=threading.active_count(),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def require_no_growth(early: Sizes, late: Sizes, *, slack_keys: int) -> None:
    """Require no growth. A retained epoch more or less is chance, but a leak in every epoch would appear 160 times."""
    told = f"\nearly {early}\nlate  {late}"
    assert late.keys <= early.keys + slack_keys, told
    assert late.key_bytes <= early.key_bytes * 1.3 + 5000, told
    assert late.fields <= early.fields + 12, told
    assert late.consumers <= early.consumers + 6, told
    assert late.scripts <= early.scripts + 3, told
    assert late.connections <= early.connections + 2, told
    assert late.descriptors <= early.descriptors + 3, told
    assert late.threads <= early.threads + 1, told
    assert late.resident_bytes <= early.resident_bytes + (16 << 20), told


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["epochs:2", "budget"])
def test_two_hundred_epochs_leave_as_much_behind_as_forty(
    fresh_server: Callable[..., EmbeddedServer], monkeypatch: pytest.MonkeyPatch, retention: str
) -> None:
    """A training of a year must not end because its server, or its own process, slowly filled up."""
    monkeypatch.setattr(cleaner, "CLEAN_UP_EVERY_S", 0.05)
    server = fresh_server()
    budget = 1 << 20 if retention == "epochs:2" else 8 * EPOCH_BYTES
    settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 4 * SAMPLE_BYTES, "budget_bytes": budget}
    found: dict[int, Sizes] = {}
    with connect(server.url) as client, writer_of(server.url, retention=retention, **settings) as writer:
        join_group(client, Membership(writer.stream, "short", "", ""), declared=True)
        with loader_of(server.url, "long") as long:
            for number in range(1, LATE + 1):
                epoch = writer.epoch(sizes=[SHARD_SAMPLES] * SHARDS)
                for shard in range(SHARDS):
                    with epoch.shard(shard) as part:
                        for offset in range(SHARD_SAMPLES):
                            if offset == 3:
                                part.quarantine("truncated")
                            else:
                                part.write(sample(offset))
                assert len(numbers(long)) == SHARDS * (SHARD_SAMPLES - 1)
                if number % 4 == 0:  # members come and go, each under a new name
                    with loader_of(server.url, "short", member=f"run-{number}") as short:
                        for _ in range(4):
                            assert len(numbers(short)) == SHARDS * (SHARD_SAMPLES - 1)
                if number in (EARLY, LATE):
                    cleaner.clean_up(client, writer.stream, lambda _: None)
                    found[number] = measure(client, "t")
            stream = load_stream(client, "t")
            released = read_counters(client, stream)[2]
            assert "," not in released
            assert released.startswith("0-")
            assert int(client.xlen(stream.keys.events)) <= 2 * EVENTS_KEPT
            assert len(load_roster(client, stream.partitions[0]).members) == 1
            kept = len(retained_epochs(client, stream))
            assert kept == 2 if retention == "epochs:2" else 2 <= kept <= 8
    # one key, `paces`, exists once a process has been at work for two seconds
    require_no_growth(found[EARLY], found[LATE], slack_keys=1 if retention == "epochs:2" else 40)


@pytest.mark.slow
def test_jobs_leave_nothing_on_the_queues_server(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """Thousands of shards a day, and each job was once a key that stayed."""
    streams, queue = fresh_server(), fresh_server()
    config = parse_config({"kind": "dataset", "name": "tests.producer.made:numbers", "transform": None})
    options = WorkerOptions(url=streams.url, queue_url=queue.url)
    with redis.Redis.from_url(queue.url) as client, redis.Redis.from_url(streams.url) as kept:
        for epochs in (1, 3, 6):
            plan = ProductionPlan(stream="t", source=config, epochs=epochs, shard_samples=10, retention="epochs:1")
            with Production(plan, options, workers=2, notify=lambda _: None) as production:
                for _ in production.run():
                    pass
                summary = production.summary()
            assert summary.samples == epochs * made.SAMPLES
            assert summary.nbytes > 0
            assert summary.workers
            lasting = [key for key in client.scan_iter(match="*") if int(client.ttl(key)) < 0]
            assert lasting == [], epochs  # rq's notes of ended workers expire in a minute
        assert not list(kept.scan_iter(match="rq:*"))
