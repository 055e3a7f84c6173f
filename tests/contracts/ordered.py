"""Shared parts of the tests of ordered reading: epochs with holes in many shards, their ranks, and the rule."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from penstock_common.tuning import Canonical
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import EpochWriter, Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, sample
from tests.tuned import tuned


def write_shard(epoch: EpochWriter, number: int, sizes: Sequence[int], bad: frozenset[int]) -> None:
    """Write one shard of an epoch whose sample at position p is `sample(p)`."""
    start = sum(sizes[:number])
    with epoch.shard(number) as shard:
        for position in range(start + shard.position, start + sizes[number]):
            if position in bad:
                shard.quarantine("bad")
            else:
                shard.write(sample(position))


def write_shards(epoch: EpochWriter, numbers: Sequence[int], sizes: Sequence[int], bad: frozenset[int]) -> None:
    """Write several shards in this order."""
    for number in numbers:
        write_shard(epoch, number, sizes, bad)


def planned_writer(url: str, partitions: int = 1, block_samples: int = 7, **settings: Any) -> Writer:
    """Return a writer of 't'."""
    settings = {"spec": SPEC, "block_bytes": block_samples * SAMPLE_BYTES, "notify": lambda _: None, **settings}
    return Writer("t", url=url, partitions=partitions, **tuned("Writer", settings))


def plan(
    url: str, sizes: Sequence[int], bad: frozenset[int] = frozenset(), *, turn: Sequence[int] | None = None,
    epochs: int = 1, **settings: Any,
) -> None:  # fmt: skip
    """Write planned epochs, shard after shard in the order ``turn``."""
    with planned_writer(url, **settings) as writer:
        for _ in range(epochs):
            epoch = writer.epoch(sizes=list(sizes))
            write_shards(epoch, turn or range(len(sizes)), sizes, bad)


def expected(total: int, bad: frozenset[int], lo: int, hi: int) -> list[int]:
    """Return the rule: at each position its sample, or the next good one, cyclically."""
    return [next(q % total for q in count(p) if q % total not in bad) for p in range(lo, hi)]


@contextmanager
def rank_of(
    url: str, rank: int = 0, world: int = 1, batch: int = 8, group: str = "g", **settings: Any
) -> Iterator[Loader]:
    """Return a quiet rank of an ordered group of 't' that never waits for long."""
    settings = {"notify": lambda _: None, "timeout_s": 30, **settings}
    with Loader(
        "t",
        group=group,
        batch_size=batch,
        url=url,
        order=Canonical(rank=rank, world_size=world),
        **tuned("Loader", settings),
    ) as loader:
        yield loader


def read_ranks(url: str, world: int, batch: int, epochs: int = 1, **settings: Any) -> list[list[list[int]]]:
    """Return the batches of each rank. All ranks read at the same time."""
    found: list[list[list[int]]] = [[] for _ in range(world)]
    errors: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            with rank_of(url, rank, world, batch, **settings) as loader:
                for _ in range(epochs):
                    found[rank] += [one["y"].tolist() for one in loader]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return found


def interleaved(ranks: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the ranks' batches as one sequence, step after step."""
    return [number for step in zip(*ranks, strict=True) for batch in step for number in batch]
