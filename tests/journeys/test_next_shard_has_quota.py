"""No deadlock: with any process killed, stopped or late, the shard that all wait for gets quota and is made.

Budgets are a fraction of an epoch, so that every rule of quota is met in every run; processes and servers are real.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.registry import FailedJobRegistry, StartedJobRegistry

from penstock_common.errors import CheckpointOverdue
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import WaitingWriter, load_roster
from penstock_common.stream.manifest import find_manifest
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.jobs.allowlist import ANYTHING
from penstock_producer.jobs.fleet import Fleet
from penstock_producer.jobs.plan import ProductionPlan, cut
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.queue import open_queue
from penstock_producer.jobs.worker import QUEUE, WorkerOptions
from penstock_producer.sources.config import DatasetConfig
from penstock_producer.write.writer import Writer, WriterHooks
from tests.contracts.feed import SAMPLE_BYTES, SPEC, sample
from tests.contracts.processes import child
from tests.producer.made import SAMPLES
from tests.tuned import tuned

PATIENCE_S = 60.0
BUDGET, BLOCK, SHARD = 1500, 120, 15
"""An epoch has 120 samples of 24 bytes, 2880 in all; the 3 blocks of a shard fit the last quarter."""


def plan_of(transform: str, **settings: Any) -> ProductionPlan:
    """The numbers in their order, through a budget of half an epoch."""
    source = DatasetConfig(name="tests.producer.made:numbers", transform=f"tests.producer.made:{transform}")
    settings = {"shard_samples": SHARD, "budget_bytes": BUDGET, "block_bytes": BLOCK, "shuffle": False, **settings}
    return ProductionPlan(stream="train", source=source, **settings)


def options_of(url: str, **settings: Any) -> WorkerOptions:
    """Streams and jobs on one server; a lease that no test outlasts."""
    return WorkerOptions(url=url, queue_url=url, allowlist=ANYTHING, **{"room_wait_s": 30.0, **settings})


class Running:
    """A production that goes on in a thread of its own."""

    def __init__(self, production: Production) -> None:
        self._production, self._error = production, list[BaseException]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in self._production.run():
                pass
        except BaseException as error:
            self._error.append(error)

    def finish(self) -> None:
        """Waits for the end and raises what went wrong."""
        self._thread.join(PATIENCE_S)
        for error in self._error:
            raise error
        assert not self._thread.is_alive()


@contextmanager
def producing(plan: ProductionPlan, options: WorkerOptions, workers: int) -> Iterator[tuple[Production, Running]]:
    """A production under way."""
    with Production(plan, options, workers=workers, notify=lambda _: None) as production:
        yield production, Running(production)


def read_all(url: str, epochs: int = 1, name: str = "train", **settings: Any) -> list[int]:
    """Return the first number of each sample that a trainer gets from the next epochs, sorted."""
    found: list[int] = []
    settings = {"group": "g", "batch_size": 5, "timeout_s": PATIENCE_S, "notify": lambda _: None, **settings}
    with Loader(name, url=url, **tuned("Loader", settings)) as loader:
        for _ in range(epochs):
            for batch in loader:
                found += [int(x) for x in batch["x"][:, 0]]
    return sorted(found)


def waiters(client: Client, name: str = "train") -> dict[tuple[int, int], WaitingWriter]:
    """Return the writers that wait for quota, in all partitions."""
    found: dict[tuple[int, int], WaitingWriter] = {}
    for partition in load_stream(client, name).partitions:
        found |= load_roster(client, partition).waiting
    return found


def await_that(look: Callable[[], Any], what: str) -> Any:
    """Until it is so; fails with what was waited for."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


@pytest.fixture
def control(any_url: str) -> Iterator[Client]:
    """A control connection to ``any_server``."""
    with connect(any_url) as client:
        yield client


# --- the shard that everybody waits for ---


def test_a_killed_first_shard_is_made_in_the_room_kept_for_it(
    any_url: str, control: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later shards have filled all they may when the worker of the first is killed: there must be an end."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(mark))
    with producing(plan_of("holds_up_the_first"), options_of(any_url), 2) as (_, running):
        await_that(mark.exists, "the first shard is begun")
        place, waiter = await_that(lambda: waiters(control) and next(iter(waiters(control).items())), "others wait")
        assert place[1] > 0
        assert not waiter.is_next
        later_bytes = waiter.held_bytes - BLOCK  # of the first shard one block is there, which may have come last
        assert later_bytes <= BUDGET * 0.75 < waiter.held_bytes + waiter.need_bytes
        os.kill(int(mark.read_text()), signal.SIGKILL)
        await_that(lambda: 0 in _done(control), "the first shard is complete, though nobody reads")
        assert read_all(any_url) == list(range(SAMPLES))
        running.finish()
    assert not waiters(control)


def test_a_killed_first_shard_does_not_stop_ordered_readers(
    any_url: str, control: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can use nothing of what is ahead, so nothing of it goes: the reserve carries the shard they wait for."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(mark))
    plan = plan_of("holds_up_the_first", block_bytes=2 * SAMPLE_BYTES)
    with producing(plan, options_of(any_url), 2) as (_, running):
        await_that(mark.exists, "the first shard is begun")
        found: dict[int, list[int]] = {}

        def read(rank: int) -> None:
            ranked: dict[str, Any] = {"order": "canonical", "rank": rank, "world_size": 2, "batch_size": 1}
            found[rank] = read_all(any_url, **ranked)

        ranks = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
        await_that(lambda: any(not waiter.is_next for waiter in waiters(control).values()), "others wait")
        os.kill(int(mark.read_text()), signal.SIGKILL)
        for rank in ranks:
            rank.join(PATIENCE_S)
        running.finish()
    assert sorted(found[0] + found[1]) == list(range(SAMPLES))


@pytest.mark.parametrize("order", [None, "canonical"])
def test_a_checkpoint_window_below_the_budget_passes_and_a_larger_one_is_named(any_url: str, order: str | None) -> None:
    """Only the trainer can free what it keeps until its checkpoint, so it gets through or gets an error."""
    ranked = {} if order is None else {"order": order, "rank": 0, "world_size": 1}
    settings: dict[str, Any] = {
        "group": "g", "batch_size": 2, "acknowledge": "on_checkpoint", "prefetch_bytes": 1, "timeout_s": PATIENCE_S,
        "notify": lambda _: None, **ranked,
    }  # fmt: skip
    plan = plan_of("with_pid", block_bytes=2 * SAMPLE_BYTES)
    with (
        producing(plan, options_of(any_url), 2) as (_, running),
        Loader("train", url=any_url, **tuned("Loader", settings)) as loader,
    ):
        assert train(loader, window=24) == SAMPLES // 2
        running.finish()
    with producing(plan, options_of(any_url), 2), Loader("train", url=any_url, **tuned("Loader", settings)) as loader:
        began = time.monotonic()
        with pytest.raises(CheckpointOverdue, match="budget"):
            train(loader, window=1000)
        assert time.monotonic() - began < 30


def train(loader: Loader, window: int) -> int:
    """Read one epoch with a checkpoint every ``window`` steps and at its end, and return the steps."""
    step = 0
    for batch in loader:
        step += 1
        assert batch.size == 2
        if step % window == 0:
            loader.checkpointed()
    loader.checkpointed()
    return step


def test_one_worker_with_jobs_in_the_wrong_order_makes_the_first_shard_first(any_url: str, control: Client) -> None:
    """A job that waits for space must not hold the only worker back from the shard that everybody waits for."""
    with producing(plan_of("with_pid"), options_of(any_url), 0) as (_, running):
        queue = open_queue(control, QUEUE)
        jobs = len(cut(SAMPLES, SHARD))
        ids = await_that(lambda: len(found := queue.get_job_ids()) == jobs and found, "a job for each shard")
        control.delete(queue.key)
        control.rpush(queue.key, *reversed(ids))
        began = time.monotonic()
        fleet = Fleet(options_of(any_url), 1)
        try:
            await_that(lambda: 0 in _done(control), "the first shard is complete, though nobody reads")
            assert time.monotonic() - began < 15, "it waited a lease in each of the others"
            assert read_all(any_url) == list(range(SAMPLES))
            running.finish()
        finally:
            fleet.stop()
    assert _registries_are_clean(control)


def test_one_worker_left_of_three_ends_the_epoch(any_url: str, control: Client) -> None:
    """Hosts are lost in the middle of shards, with the budget full: the last one does their work."""
    fleet = Fleet(options_of(any_url, heartbeat_ttl_s=1), 3)
    try:
        with producing(plan_of("slowly"), options_of(any_url), 0) as (_, running):
            await_that(lambda: waiters(control), "the budget is full")
            for pid in fleet.pids[:2]:
                os.kill(pid, signal.SIGKILL)
            assert read_all(any_url) == list(range(SAMPLES))
            running.finish()
    finally:
        fleet.stop()
    assert _registries_are_clean(control)


def test_epochs_ahead_leave_room_for_the_one_that_is_read(any_url: str, control: Client) -> None:
    """Four epochs of twice the budget each, three of them in work at once: they end in order."""
    plan = plan_of("with_pid", epochs=4, ahead=3)
    with producing(plan, options_of(any_url), 2) as (_, running):
        assert read_all(any_url, 4) == sorted(list(range(SAMPLES)) * 4)
        running.finish()
    assert _registries_are_clean(control)


# --- several partitions, several streams ---


def test_uneven_shards_in_several_partitions_all_pass(any_url: str) -> None:
    """A partition's part of the budget is small, and the shards in it may be long: each has its own lowest shard."""
    sizes = [3, 200, 1, 90, 7, 2, 150]
    settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 5 * SAMPLE_BYTES, "budget_bytes": 3 * 40 * SAMPLE_BYTES}
    with Writer(
        "train", url=any_url, partitions=3, **tuned("Writer", settings, Tuning(notify=lambda _: None))
    ) as writer:
        writer.epoch(sizes=sizes)
    writers = [child(write_shards, any_url, *shards) for shards in ((6, 4, 2), (5, 3), (1, 0))]
    with writers[0] as first, writers[1] as second, writers[2] as third:
        assert len(read_all(any_url)) == sum(sizes)
        for one in (first, second, third):
            one.rest()


def write_shards(url: str, *shards: str) -> None:
    """A process that writes some shards of epoch 0, one after the other."""
    with Writer("train", url=url, tuning=Tuning(notify=lambda _: None)) as writer:
        manifest = find_manifest(writer.client, writer.stream, 0)
        assert manifest is not None
        for shard in map(int, shards):
            with WriterHooks(writer).open_shard(manifest, shard) as one:
                for offset in range(manifest.shard_size(shard)):
                    one.write(sample(offset))


def test_a_stream_nobody_reads_holds_up_no_other(any_url: str, control: Client) -> None:
    """Budgets are per stream: one that is full must cost the others nothing."""
    settings: dict[str, Any] = {"budget_bytes": 40 * SAMPLE_BYTES, "block_bytes": 5 * SAMPLE_BYTES, "spec": SPEC}
    for name in ("full", "train"):
        with Writer(name, url=any_url, **tuned("Writer", settings, Tuning(notify=lambda _: None))) as writer:
            writer.epoch(0, sizes=[300])
    with child(write_epoch, any_url, "full") as full, child(write_epoch, any_url, "train") as other:
        await_that(lambda: waiters(control, "full"), "the first stream is full")
        assert read_all(any_url) == list(range(300))
        other.rest()
        assert waiters(control, "full")
        assert read_all(any_url, name="full") == list(range(300))
        full.rest()


def write_epoch(url: str, name: str) -> None:
    """A process that writes the one shard of epoch 0."""
    with Writer(name, url=url, tuning=Tuning(notify=lambda _: None)) as writer:
        manifest = find_manifest(writer.client, writer.stream, 0)
        assert manifest is not None
        with WriterHooks(writer).open_shard(manifest, 0) as one:
            for number in range(300):
                one.write(sample(number))


# --- ends ---


def test_a_worker_stopped_while_it_waits_for_room_ends_at_once(any_url: str, control: Client) -> None:
    """A host is taken away with SIGTERM; its job has not lost its turn, and its wait is over for all who look."""
    with producing(plan_of("with_pid"), options_of(any_url), 0):
        fleet = Fleet(options_of(any_url), 1)
        place, _ = await_that(lambda: waiters(control) and next(iter(waiters(control).items())), "it waits for space")
        began = time.monotonic()
        fleet.stop()
        assert time.monotonic() - began < 2.5
        assert not waiters(control)
        queue = open_queue(control, QUEUE)
        assert queue.get_job_ids()[0].endswith(f"-{place[1]}")
        assert StartedJobRegistry(queue=queue).count == 0


# --- a server filled by others ---


def test_writers_stop_before_a_server_is_full_and_everything_else_works(fresh_server: Any) -> None:
    """Under OOM the server refuses job queues, joining groups and others' keys: writers must never bring that about."""
    server = fresh_server(maxmemory_bytes=256 << 20)
    with redis.Redis.from_url(server.url) as client, connect(server.url) as control:
        for number in range(45):
            client.set(f"foreign{number}", bytes((4 << 20) - 100))
        plan = plan_of("wide", budget_bytes=100 << 20, block_bytes=1 << 20)
        with producing(plan, options_of(server.url), 2) as (production, running):
            waiter = await_that(lambda: waiters(control) and next(iter(waiters(control).values())), "a writer waits")
            assert waiter.why == "memory"
            assert client.info("memory")["used_memory"] < (256 << 20) * 0.95
            client.set("others", bytes(4 << 20))
            before = client.info("stats")["total_commands_processed"]
            time.sleep(2)
            assert client.info("stats")["total_commands_processed"] - before < 600, "waiting writers spin"
            assert all(Path(f"/proc/{pid}").exists() for pid in production._fleet.pids)
            assert len(read_all(server.url, batch_size=4)) == SAMPLES
            running.finish()
        assert _registries_are_clean(control)
        assert sum(1 for _ in client.scan_iter(match="foreign*", count=1000)) == 45


def _done(client: Client) -> dict[int, int]:
    manifest = find_manifest(client, load_stream(client, "train"), 0)
    return manifest.done if manifest is not None else {}


def _registries_are_clean(client: Client) -> bool:
    """No job is left running, waiting or failed."""
    queue = open_queue(client, QUEUE)
    return not (queue.count or StartedJobRegistry(queue=queue).count or FailedJobRegistry(queue=queue).count)
