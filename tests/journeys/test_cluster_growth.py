"""A cluster that grows under a writer and a training: its new master takes the slots of a stream."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

import penstock
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import find_servers, server_label
from tests.clusters import Cluster, started_cluster

PAUSE_S = 1.0
"""The longest pause of a training while slots move at once."""
LOAD_S = 1.5
"""What a loaded machine may add."""
SHARDS, EACH, BATCH = 6, 200, 10
STEP_S = 0.02
Move: TypeAlias = Callable[[Cluster, list[str]], None]
AT = 30
"""The batches before the slots move."""


def written(writer: penstock.Writer) -> None:
    """Write an epoch of many small blocks, as slowly as it is read."""
    with writer.epoch(sizes=[EACH] * SHARDS) as epoch:
        for number in range(SHARDS):
            with epoch.shard(number) as shard:
                for offset in range(EACH):
                    shard.write({"x": np.full(500, number * EACH + offset)})
                    if offset % BATCH == BATCH - 1:
                        shard.flush()
                        time.sleep(STEP_S)


def move_by_key(cluster: Cluster, keys: list[str]) -> None:
    """Move the slots to the newest master, key by key. Who moves them dies half-way, and somebody else ends it."""
    for key in keys:
        finish = cluster.half_move_slot_of(key, cluster.masters[-1], keys_at_most=2)
        time.sleep(0.5)
        finish()


def move_at_once(cluster: Cluster, keys: list[str]) -> None:
    """Move the slots to the newest master as a whole."""
    cluster.move_at_once(keys, cluster.masters[-1])


def read_while_slots_move(cluster: Cluster, partitions: int, move: Move) -> float:
    """Write and read an epoch while a new master takes all slots of the stream. Return the training's longest pause."""
    tuning = penstock.Tuning(prefetch_bytes=4 * BATCH * 4000, notify=lambda _: None)
    seen: Counter[int] = Counter()
    at_s: list[float] = []
    with (
        penstock.Writer("train", url=cluster.url, spec={"x": ("int64", (500,))}, partitions=partitions) as writer,
        penstock.Loader("train", group="g", batch_size=BATCH, url=cluster.url, tuning=tuning) as loader,
    ):
        keys = [writer.stream.keys.meta, *(partition.roster for partition in writer.stream.partitions[1:])]
        writing = threading.Thread(target=written, args=(writer,))
        cluster.add_master()
        moving = threading.Thread(target=move, args=(cluster, keys))
        writing.start()
        for batch in loader:
            at_s.append(time.monotonic())
            rows = batch["x"]
            assert (rows == rows[:, :1]).all()
            seen.update(int(number) for number in rows[:, 0])
            time.sleep(STEP_S)
            if len(at_s) == AT:
                moving.start()
        for thread in (writing, moving):
            thread.join()
    assert {cluster.master_of(key) for key in keys} == {cluster.masters[-1]}
    assert seen == dict.fromkeys(range(SHARDS * EACH), 1)
    with connect(cluster.url) as client:
        assert audit_stream(client, "train", deep=True).findings == []
    return max(later - before for before, later in pairwise(at_s))


def of_at_least_9(executable: Path) -> bool:
    """Whether a server moves slots as a whole."""
    product, _, version = server_label(executable).partition("-")
    return product == "valkey" and int(version.partition(".")[0]) >= 9


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_training_hardly_pauses_while_a_new_master_takes_its_slots_at_once(partitions: int) -> None:
    """An operator adds a master to a cluster that is in use, and every partition of a stream moves there."""
    executable = next(filter(of_at_least_9, find_servers()), None)
    if executable is None:
        pytest.skip("no server here moves slots at once")
    with started_cluster(executable) as cluster:
        assert read_while_slots_move(cluster, partitions, move_at_once) < PAUSE_S + LOAD_S


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_slots_that_a_new_master_takes_by_key_cost_no_sample(executable: Path) -> None:
    """The tool that moves them may die half-way, and requests are refused until somebody ends the move."""
    with started_cluster(executable) as cluster:
        read_while_slots_move(cluster, 3, move_by_key)
