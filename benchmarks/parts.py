"""The parts of a worker's CPU time apart from decode and transform: each side does one thing more than the side before.

All sides run in one process, in turns of about fifty samples, the same ones with the same crops for every side. So a
side costs what it costs between decodes, which need all caches. Alone, in a loop, it would cost a fraction of that. The
last side is all of a shard; ``tax`` has the jobs around it. It needs an internal part, the worker's writer, so it
measures only its own tree.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.loading_sides import STREAM
from benchmarks.photographs import Photographs, photographs
from benchmarks.tax import begin_stream
from benchmarks.trainers import QUIET, in_clean_process

SAMPLES = 53
"""The samples of a turn, as many as a block in a segment has."""
TURNS = 40
SIZES = [SAMPLES] * (TURNS + 1)


class SameCrops(Photographs):
    """Photographs whose samples are the same for every side."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        random.seed(index)
        return super().__getitem__(index)


def take_apart(payload: str) -> tuple[float, dict[str, float]]:
    """Return CPU milliseconds a sample of the bare loop, and side -> its further cost.

    Both are medians over the turns.
    """
    found: tuple[float, dict[str, float]] = in_clean_process(_take_apart, payload)
    return found


def _take_apart(payload: str) -> tuple[float, dict[str, float]]:
    from penstock import EmbeddedServer, Writer
    from penstock_common.stream.removal.deletion import delete_stream
    from penstock_producer.jobs.watchdog import keep_freed

    keep_freed()
    data = SameCrops(photographs().paths)
    with EmbeddedServer() as server:
        begin_stream(server.url, payload, SIZES)
        with Writer(STREAM, url=server.url, **QUIET) as writer:
            spent = _in_turns(data, writer)
            delete_stream(writer.client, STREAM)  # with its segments
    bare, *more = (taken[1:] for taken in spent.values())  # the first turn is not warm
    beyond = [statistics.median([one - other for one, other in zip(taken, bare, strict=True)]) for taken in more]
    return statistics.median(bare), dict(zip(list(spent)[1:], beyond, strict=True))


def _in_turns(data: Any, writer: Any) -> dict[str, list[float]]:
    epoch = writer.epoch(sizes=SIZES)
    sides = _sides(data, writer, epoch)
    spent: dict[str, list[float]] = {side: [] for side in sides}
    rng = np.random.default_rng(1)
    for turn in range(TURNS + 1):
        items = rng.integers(len(data), size=SAMPLES).tolist()
        for side in list(sides)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            sides[side](items, turn)
            spent[side].append(1000 * (time.process_time() - began) / SAMPLES)
    return spent


def _sides(data: Any, writer: Any, epoch: Any) -> dict[str, Callable[[list[int], int], None]]:
    from penstock_common.wire.codec import encode
    from penstock_producer.jobs.fill import EpochSeed, FailureLimit, fill_samples
    from penstock_producer.sources.dataset import DatasetSource
    from penstock_producer.write.shard import ShardWriter

    source = DatasetSource(data, "photographs")

    def bare(items: list[int], turn: int) -> None:
        for item in items:
            data[item]

    def fill(items: list[int], turn: int, shard: Any) -> None:
        fill_samples(source, items, shard, turn, EpochSeed(1, 0), FailureLimit(lambda: False))

    def write(items: list[int], turn: int, shard: Any) -> None:
        fill(items, turn, shard)
        shard.close()

    def into(committer: Any) -> ShardWriter:
        return ShardWriter(
            committer, writer.stream.spec, block_bytes=writer.stream.block_bytes, shard=0, size=SAMPLES,
            finish=lambda size: None,
        )  # fmt: skip

    def checked(block: Any) -> None:
        encode(block, stream=writer.stream.id, epoch=0, shard=0, checksum=True)

    return {
        "bare loop": bare,
        "and seeds, source, supervision": lambda items, turn: fill(items, turn, Nowhere()),
        "and blocks": lambda items, turn: write(items, turn, into(Nowhere())),
        "and headers and checksums": lambda items, turn: write(items, turn, into(Nowhere(checked))),
        "and all of writing a shard": lambda items, turn: write(items, turn, epoch.shard(turn)),
    }


class Nowhere:
    """A shard and a committer that keep nothing."""

    position = 0

    def __init__(self, see: Callable[[Any], None] = lambda block: None) -> None:
        self._see = see

    def write(self, sample: Any) -> None:
        """Take one sample."""

    def place(self, count: int) -> None:
        """Return None: blocks may be made anywhere."""

    def commit(self, block: Any, bad: Any = None) -> None:
        """Take one block."""
        self._see(block)

    def commit_all(self) -> None:
        """Do nothing, because nothing is kept."""

    def require_whole(self, end: int) -> None:
        """Do nothing, because nothing is kept."""

    def finish(self) -> None:
        """Do nothing."""
