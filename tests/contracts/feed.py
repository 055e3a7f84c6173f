"""Shared parts of the tests of writers and readers: numbered samples, their streams, and a reading of a server's
contents. The reading uses redis-py and the header alone, not the code under test.
"""

from __future__ import annotations

import gc
import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock_common.stream.commands import Client
from penstock_common.stream.streams import Stream, load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_consumer.stages.batch import Batch
from penstock_producer.write.writer import Writer
from tests.tuned import tuned

SPEC = {"x": ("float32", (4,)), "y": ("int64", ())}
SAMPLE_BYTES = 24


def sample(number: int) -> dict[str, Any]:
    """Return the sample ``number``, which shows in both its tensors."""
    return {"x": np.full(4, number, np.float32), "y": number}


def produce(url: str, name: str, count: int, *, epochs: int = 1, block_samples: int = 10, **settings: Any) -> None:
    """Write epochs of the samples 0 .. count - 1, in one shard each."""
    settings = {"spec": SPEC, "block_bytes": block_samples * SAMPLE_BYTES, **settings}
    with Writer(name, url=url, **tuned("Writer", settings, Tuning(notify=lambda _: None))) as writer:
        for _ in range(epochs):
            with writer.epoch() as epoch:
                for number in range(count):
                    epoch.write(sample(number))


def numbers(batches: Iterable[Batch]) -> list[int]:
    """Return the samples' numbers in order, after checking that both tensors of each sample agree."""
    found: list[int] = []
    for batch in batches:
        assert np.array_equal(batch["x"], np.repeat(batch["y"].astype(np.float32)[:, None], 4, axis=1))
        found += batch["y"].tolist()
    return found


def open_stream(client: Client, name: str) -> Stream:
    """Return the stream's keys."""
    return load_stream(client, name)


def entries(client: Client, name: str, epoch: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return all entries of an epoch, in any partition."""
    found: list[tuple[bytes, dict[bytes, bytes]]] = []
    for partition in load_stream(client, name).partitions:
        found += client.xrange(partition.entries(epoch))
    return found


def stored(client: Client, name: str, epoch: int) -> Counter[tuple[int, int]]:
    """Return (shard, offset) of every sample in the server's entries, by their headers."""
    found: Counter[tuple[int, int]] = Counter()
    for _, fields in entries(client, name, epoch):
        meta = json.loads(fields[b"meta"])
        holes = set(meta.get("holes", ()))
        for offset in range(meta["first"], meta["first"] + meta["count"] + len(holes)):
            if offset not in holes:
                found[meta["shard"], offset] += 1
    return found


def index_spans(client: Client, name: str, epoch: int, shard: int) -> list[tuple[int, int]]:
    """Return [first, end) of every index record of a shard."""
    key = load_stream(client, name).partition_of(shard).index(epoch, shard)
    return [(int(fields[b"f"]), int(record.partition(b"-")[0])) for record, fields in client.xrange(key)]


def is_contiguous(spans: list[tuple[int, int]], size: int) -> bool:
    """Return whether spans follow each other from 0 to ``size``."""
    return [0, *(hi for _, hi in spans)] == [*(lo for lo, _ in spans), size]


def payload_bytes(client: Client, name: str, epoch: int) -> int:
    """Return the payload bytes of the existing entries, without shapes."""
    total = 0
    for _, fields in entries(client, name, epoch):
        meta = json.loads(fields[b"meta"])
        named = dict(zip(_fields_of(meta), meta["ref"][2], strict=True)) if "ref" in meta else {}
        named |= {field.decode(): len(value) for field, value in fields.items()}
        total += sum(size for field, size in named.items() if field != "meta" and not field.endswith(".shapes"))
    return total


def _fields_of(meta: dict[str, Any]) -> list[str]:
    """Return the field names of tensors of fixed shapes, which all samples here have."""
    return list(meta["tensors"])


def accounted_bytes(client: Client, name: str) -> tuple[int, dict[int, int]]:
    """Return the bytes that the rosters count, in total and by epoch."""
    total, by_epoch = 0, Counter[int]()
    for partition in load_stream(client, name).partitions:
        roster = client.hgetall(partition.roster)
        total += int(roster.get(b"bytes", 0))
        for field, value in roster.items():
            if field.startswith(b"b:"):
                by_epoch[int(field[2:])] += int(value)
    return total, dict(by_epoch)


@contextmanager
def loader_of(url: str, group: str = "g", batch_size: int = 8, **settings: Any) -> Iterator[Loader]:
    """Return a quiet loader of 't' that never waits for long."""
    settings = {"notify": lambda _: None, "timeout_s": 20, **settings}
    with Loader("t", group=group, batch_size=batch_size, url=url, **tuned("Loader", settings)) as loader:
        yield loader


def writer_of(url: str, **settings: Any) -> Writer:
    """Return a writer of the stream 't' without notices."""
    return Writer("t", url=url, **tuned("Writer", {"notify": lambda _: None, **settings}))


def replayed(url: str, epoch: int = 0, batch_size: int = 64) -> list[int]:
    """Return the numbers of an epoch in canonical order."""
    with Replay("t", url=url, epoch=epoch, batch_size=batch_size) as replay:
        return numbers(replay)


@contextmanager
def connections_cut(client: Client, *, spared: str, every_s: float = 0.01) -> Iterator[None]:
    """Close the connections of all other clients again and again during the block."""
    done = threading.Event()

    def cut() -> None:
        while not done.wait(every_s):
            for info in client.client_list():
                if info["cmd"] not in ("client", "client|list") and info["name"] != spared:
                    client.client_kill_filter(_id=info["id"])

    cutter = threading.Thread(target=cut, daemon=True)
    cutter.start()
    try:
        yield
    finally:
        done.set()
        cutter.join()


@contextmanager
def no_connection_left(client: Client, within_s: float = 5.0) -> Iterator[None]:
    """Require that connections made in the block soon end. Processes of other tests may keep theirs."""
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # what earlier tests left is not of this block
    before = {info["id"] for info in client.client_list()}
    yield
    deadline = time.monotonic() + within_s
    while True:
        gc.collect()
        left = [info for info in client.client_list() if info["id"] not in before]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert left == []
