"""A cluster that grows under a writer and a training: its new master takes the slots of a stream."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
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
LOAD_S = 9.0
"""The time that a loaded machine may add. A pause took 5 s on one with a third of the usual speed."""
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
    """Move the slots to the newest master, key by key. Each mover dies half-way, and another one ends the move."""
    for key in keys:
        finish = cluster.half_move_slot_of(key, cluster.masters[-1], keys_at_most=2)
        time.sleep(0.5)
        finish()


def move_at_once(cluster: Cluster, keys: list[str]) -> None:
    """Move the slots to the newest master as a whole."""
    cluster.move_at_once(keys, cluster.masters[-1])


@dataclass
class Training:
    """The samples that one member of the group received, and the times of its batches."""

    loader: penstock.Loader
    seen: Counter[int] = field(default_factory=Counter)
    at_s: list[float] = field(default_factory=list)

    def run(self, then: Callable[[int], None] = lambda batches: None) -> None:
        """Read an epoch, and call ``then`` with the number of batches after each."""
        for batch in self.loader:
            self.at_s.append(time.monotonic())
            rows = batch["x"]
            assert (rows == rows[:, :1]).all()
            self.seen.update(int(number) for number in rows[:, 0])
            time.sleep(STEP_S)
            then(len(self.at_s))

    @property
    def longest_pause_s(self) -> float:
        """The longest time from one batch to the next."""
        return max(later - before for before, later in pairwise(self.at_s))


def read_while_slots_move(cluster: Cluster, partitions: int, move: Move, members: int = 1) -> float:
    """Write and read an epoch while a new master takes all slots of the stream. Return the longest pause."""

    def loader_of(member: int) -> penstock.Loader:
        tuning = penstock.Tuning(member=f"m{member}", prefetch_bytes=4 * BATCH * 4000, notify=lambda _: None)
        return penstock.Loader("train", group="g", batch_size=BATCH, url=cluster.url, tuning=tuning)

    with (
        penstock.Writer("train", url=cluster.url, spec={"x": ("int64", (500,))}, partitions=partitions) as writer,
        ExitStack() as stack,
    ):
        first, *others = [Training(stack.enter_context(loader_of(member))) for member in range(members)]
        keys = [writer.stream.keys.meta, *(partition.roster for partition in writer.stream.partitions[1:])]
        cluster.add_master()
        moving = threading.Thread(target=move, args=(cluster, keys))
        threads = [threading.Thread(target=written, args=(writer,)), *(threading.Thread(target=t.run) for t in others)]
        for thread in threads:
            thread.start()
        first.run(lambda batches: moving.start() if batches == AT else None)
        for thread in (*threads, moving):
            thread.join()
    assert {cluster.master_of(key) for key in keys} == {cluster.masters[-1]}
    assert sum((one.seen for one in (first, *others)), Counter[int]()) == dict.fromkeys(range(SHARDS * EACH), 1)
    assert all(len(one.at_s) > AT for one in others)
    with connect(cluster.url) as client:
        assert audit_stream(client, "train", deep=True).findings == []
    return max(one.longest_pause_s for one in (first, *others))


def of_at_least_9(executable: Path) -> bool:
    """Whether a server moves slots as a whole."""
    product, _, version = server_label(executable).partition("-")
    return product == "valkey" and int(version.partition(".")[0]) >= 9


@pytest.mark.parametrize(("partitions", "members"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_a_training_hardly_pauses_while_a_new_master_takes_its_slots_at_once(
    partitions: int, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator adds a master to a cluster that is in use, and every partition of a stream moves there.

    A master that took over from a lost one may lack what other members acknowledged. The new one lacks nothing.
    """
    monkeypatch.setattr("penstock_consumer.read.shared.OTHERS_S", 30.0)  # the wait for others' acknowledgements
    executable = next(filter(of_at_least_9, find_servers()), None)
    if executable is None:
        pytest.skip("no server here moves slots at once")
    with started_cluster(executable) as cluster:
        assert read_while_slots_move(cluster, partitions, move_at_once, members) < PAUSE_S + LOAD_S


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_slots_that_a_new_master_takes_by_key_cost_no_sample(executable: Path) -> None:
    """The tool that moves them may die half-way, and requests are refused until an operator ends the move."""
    with started_cluster(executable) as cluster:
        read_while_slots_move(cluster, 3, move_by_key)


def move_one_by_one(cluster: Cluster, keys: list[str]) -> None:
    """Move the slots to the newest master, the first partition's at last, and let the member read in between."""
    for key in reversed(keys):
        cluster.half_move_slot_of(key, cluster.masters[-1])()
        time.sleep(0.5)


@pytest.mark.parametrize("members", [1, 2])
def test_partitions_that_leave_the_only_master_cost_no_sample(members: int) -> None:
    """Until then a member needs one connection and one thread only, and its own loop acknowledges."""
    with started_cluster(find_servers()[0], masters=1) as cluster:
        read_while_slots_move(cluster, 3, move_one_by_one, members)
