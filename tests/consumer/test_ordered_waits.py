"""An ordered reader learns of its producer while samples of other ranks come before its own."""

from __future__ import annotations

import time
from threading import Thread
from typing import Any

import pytest

from penstock_consumer.read.fetch_plan import StepPlanner
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.ordered import RowPlan
from penstock_consumer.read.worker_shares import WorkerShares, read_share
from penstock_producer.write.shard import ShardWriter
from tests.clusters import until
from tests.contracts.feed import numbers, sample
from tests.contracts.ordered import planned_writer, rank_of

PATIENCE_S = 1.0
"""The longest outage in a test."""


def fill(shard: ShardWriter, start: int, count: int) -> None:
    """Commit samples without completing the shard."""
    for number in range(start, start + count):
        shard.write(sample(number))
    shard.commit_all()


def test_a_share_that_has_all_its_steps_hears_that_the_epoch_is_complete(any_url: str) -> None:
    """The last step is another worker's. Its entries are always new to this worker, and must not hide the end."""
    with planned_writer(any_url, block_samples=2) as writer, rank_of(any_url) as loader:
        shard = writer.epoch(sizes=[19]).shard(0)
        fill(shard, 0, 19)
        part = WorkerShares(hooks_of(loader)).begin(is_first=True)
        assert part is not None
        batches = read_share(part, (1, 2))
        assert numbers([next(batches)]) == list(range(8, 16))
        shard.close()
        assert numbers(batches) == []


def test_a_rank_that_drops_the_rest_hears_that_the_epoch_is_complete(any_url: str) -> None:
    """With remainder='drop', no rank gets the samples after the last whole step."""
    with planned_writer(any_url, block_samples=2) as writer, rank_of(any_url, remainder="drop") as loader:
        shard = writer.epoch(sizes=[13]).shard(0)
        fill(shard, 0, 13)
        batches = iter(loader)
        assert numbers([next(batches)]) == list(range(8))
        shard.close()
        assert numbers(batches) == []


def test_a_shard_that_was_begun_after_the_one_before_it_was_complete_is_read(any_url: str) -> None:
    """There is a pause between two shards of an epoch without a plan, and the reader is behind all shards that it
    knows.
    """
    with planned_writer(any_url, block_samples=4) as writer, rank_of(any_url) as loader:
        epoch = writer.epoch(0)
        with epoch.shard(0) as shard:
            fill(shard, 0, 8)
        batches = iter(loader)
        assert numbers([next(batches)]) == list(range(8))
        with epoch.shard(1) as shard:
            fill(shard, 8, 8)
            assert numbers([next(batches)]) == list(range(8, 16))


def test_each_outage_of_a_long_wait_has_its_own_time(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one seemed to last since the first, and ended the training at once."""
    monkeypatch.setattr("penstock_common.waiting.OUTAGE_S", PATIENCE_S)
    found: list[int] = []

    def is_waiting() -> bool:
        return any(one["cmd"] == "xread" for one in any_client.client_list())

    with planned_writer(any_url, block_samples=4) as writer, rank_of(any_url) as loader:
        shard = writer.epoch(sizes=[16]).shard(0)
        fill(shard, 0, 8)
        batches = iter(loader)
        assert numbers([next(batches)]) == list(range(8))
        reading = Thread(target=lambda: found.extend(numbers(batches)))
        reading.start()
        for _ in range(2):
            until(is_waiting)
            any_client.client_kill_filter(_type="normal", skipme=True)
            until(is_waiting)
            time.sleep(1.5 * PATIENCE_S)
        fill(shard, 8, 8)
        shard.close()
        reading.join(20)
    assert found == list(range(8, 16))


def test_a_rank_tells_its_planner_of_what_came_and_forgets_only_what_it_has_read(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner knows by that for how many steps to wait. A record that is forgotten early is read twice."""
    reached, entries, kept = list[int](), list[tuple[int, int]](), list[bool]()
    plan_received = RowPlan.received

    def received(plan: RowPlan, take: Any) -> None:
        plan_received(plan, take)
        kept.append(plan.index.walk._known.at(take.piece.end - 1) is not None)

    monkeypatch.setattr(StepPlanner, "reached", lambda _, position, now_s: reached.append(position))
    monkeypatch.setattr(StepPlanner, "received", lambda _, nbytes, samples: entries.append((nbytes > 0, samples)))
    monkeypatch.setattr(RowPlan, "received", received)
    with planned_writer(any_url, block_samples=6) as writer, rank_of(any_url, batch=8) as loader:
        shard = writer.epoch(sizes=[24]).shard(0)
        batches = iter(loader)
        found: list[int] = []
        for start in (0, 12):
            fill(shard, start, 12)
            found += numbers([next(batches)])
        shard.close()
        assert found + numbers(batches) == list(range(24))
    assert set(entries) == {(True, 6)}
    assert reached == sorted(reached)
    assert reached[-1] == 24
    assert kept[:2] == [True, True], "the second entry is half of this step and half of the next"
