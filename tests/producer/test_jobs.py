"""Jobs with real workers: any worker makes a shard once, and what cannot be made is reported."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from rq import Callback, Queue
from rq.serializers import JSONSerializer

from penstock_common.errors import BadSpec, EpochFailed, PenstockError, SourceError
from penstock_common.stream.client import connect
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import find_stream
from penstock_producer.jobs.allowlist import ANYTHING
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.fleet import Fleet
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.progress import EpochProgress, ProductionProgress, ProductionSummary, look
from penstock_producer.jobs.task import ShardTask
from penstock_producer.jobs.worker import QUEUE, WorkerOptions
from penstock_producer.sources.config import DatasetConfig, GeneratorConfig, KerasConfig, SourceConfig
from penstock_producer.write.writer import Writer
from tests.producer.made import SAMPLES
from tests.producer.reading import bad_count, read_epoch

PATIENCE_S = 30.0


def dataset(transform: str = "with_pid") -> DatasetConfig:
    """The numbers, by import name."""
    return DatasetConfig(name="tests.producer.made:numbers", transform=f"tests.producer.made:{transform}")


def options_of(url: str) -> WorkerOptions:
    """Streams and jobs on one server."""
    return WorkerOptions(url=url, queue_url=url, room_wait_s=1.0, allowlist=ANYTHING)


def produce(
    url: str,
    source: SourceConfig,
    *,
    workers: int = 2,
    each: Callable[[ProductionProgress], None] = lambda look: None,
    patience_s: float = PATIENCE_S,
    **plan: Any,
) -> ProductionSummary:
    """One production with forked workers (they start fast), to its end."""
    asked = ProductionPlan(stream="train", source=source, **plan)
    with Production(asked, options_of(url), workers=workers) as production:
        deadline = time.monotonic() + patience_s
        for look in production.run():
            each(look)
            assert time.monotonic() < deadline, look
        return production.summary()


def numbers_in(url: str, epoch: int = 0) -> list[int]:
    """Return the numbers that an epoch holds."""
    return [int(sample["x"][0]) for sample in read_epoch(url, epoch=epoch).values()]


# --- sharing the work -------------------------------------------------------------------------------------------------


def test_two_processes_share_an_epoch(any_url: str) -> None:
    """The point of workers: the samples are made by two pids, neither of them ours, and each is there once."""
    summary = produce(any_url, dataset("slowly"), shard_samples=10)
    samples = read_epoch(any_url)
    assert sorted(int(s["x"][0]) for s in samples.values()) == list(range(SAMPLES))
    pids = {int(s["pid"]) for s in samples.values()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert (summary.samples, summary.bad, len(summary.workers)) == (SAMPLES, 0, 2)
    assert summary.nbytes == SAMPLES * (16 + 8)


def test_epochs_have_orders_of_their_own_that_a_seed_repeats(any_url: str) -> None:
    """Training needs another order each epoch; science needs the same one again."""
    produce(any_url, dataset(), epochs=2, seed=7)
    first, second = numbers_in(any_url), numbers_in(any_url, 1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    with redis.Redis.from_url(any_url) as client:
        client.flushall()
    produce(any_url, dataset(), epochs=2, seed=7, workers=1)
    assert numbers_in(any_url, 1)[:5] == second[:5]


def test_without_shuffling_the_order_is_the_sources(any_url: str) -> None:
    """Evaluation sets are compared sample by sample."""
    produce(any_url, dataset(), shuffle=False)
    assert numbers_in(any_url) == list(range(SAMPLES))


def test_a_worker_added_while_it_runs_takes_part(any_url: str) -> None:
    """More hosts may join at any time: the queue is all they share."""
    added: list[Fleet] = []

    def add(look: ProductionProgress) -> None:
        if look.done and not added:
            added.append(Fleet(options_of(any_url), 1))

    try:
        produce(any_url, dataset("slowly"), workers=1, shard_samples=6, each=add)
        assert len({int(s["pid"]) for s in read_epoch(any_url).values()}) == 2
    finally:
        for fleet in added:
            fleet.stop()


# --- workers that end -------------------------------------------------------------------------------------------------


def test_a_killed_worker_costs_nothing(url: str) -> None:
    """Kill -9 in the middle of a shard: another process goes on with it at once, no sample is lost or doubled."""
    killed: list[int] = []

    def kill(look: ProductionProgress) -> None:
        if look.done and not killed:
            killed.append(look.pids[0])
            os.kill(look.pids[0], signal.SIGKILL)

    began = time.monotonic()
    summary = produce(url, dataset("slowly"), shard_samples=60, each=kill)
    assert killed
    assert sorted(numbers_in(url)) == list(range(SAMPLES))
    assert summary.bad == 0
    assert time.monotonic() - began < 20  # no time limit has to pass


def test_a_killed_worker_that_was_replaced_is_not_silent(any_url: str, any_client: redis.Redis) -> None:
    """Doctor would ask for more workers for ten minutes, though the epoch is complete."""
    killed: list[int] = []

    def kill(look: ProductionProgress) -> None:
        if not killed and any_client.exists("penstock:{train}:paces"):
            killed.append(look.pids[0])
            os.kill(killed[0], signal.SIGKILL)

    produce(any_url, dataset("very_slowly"), workers=1, epochs=2, each=kill)
    assert killed
    assert any_client.hkeys("penstock:{train}:paces") == []


def test_a_stopped_worker_keeps_what_it_made(any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that shrinks often would else make the samples since the last commit again and again."""
    mark = tmp_path / "mark"
    mark.touch()
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(mark))
    asked = ProductionPlan(stream="train", source=dataset("takes_notes"), shard_samples=SAMPLES)
    with Production(asked, options_of(any_url), workers=0) as production:
        tasted = len(mark.read_text().splitlines())
        looks = production.run()
        leaving = Fleet(options_of(any_url), 1)
        _awaited(lambda: [next(looks)] and len(mark.read_text().splitlines()) >= tasted + 15)
        leaving.stop()
        assert len(mark.read_text().splitlines()) < tasted + SAMPLES
        helper = Fleet(options_of(any_url), 1)
        list(looks)
        helper.stop()
    made = [int(line.split()[1]) for line in mark.read_text().splitlines()[tasted:]]
    assert sorted(made) == list(range(SAMPLES)), "each sample was made once"


def test_the_bytes_of_a_shard_count_once_though_two_workers_made_it(any_url: str) -> None:
    """Budgets and bills are set by what a production says it made: not the last worker's part, nor parts twice."""
    killed: list[int] = []

    def kill(look: ProductionProgress) -> None:
        if look.done and not killed:
            killed.append(look.pids[0])
            os.kill(look.pids[0], signal.SIGKILL)

    summary = produce(any_url, dataset("very_slowly"), workers=1, shard_samples=SAMPLES, each=kill)
    made_by = {int(sample["pid"]) for sample in read_epoch(any_url).values()}
    assert len(made_by) == 2
    assert summary.nbytes == SAMPLES * (16 + 8)


def test_a_host_that_vanishes_is_replaced(any_url: str) -> None:
    """A host that lost its power sends no message: its heartbeat stops, and another worker takes the shard."""
    lost = Fleet(replace(options_of(any_url), heartbeat_ttl_s=1), 1)
    (pid,) = lost.pids
    helper: list[Fleet] = []
    asked = ProductionPlan(stream="train", source=dataset("very_slowly"), shard_samples=SAMPLES)
    with Production(asked, options_of(any_url), workers=0) as production:
        for look in production.run():
            if look.done and not helper:
                os.kill(pid, signal.SIGKILL)
                helper.append(Fleet(options_of(any_url), 1))
    helper[0].stop()
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_a_sample_that_kills_its_worker_is_tried_by_others(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out now and then; only when it always does must the epoch fail."""
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(tmp_path / "mark"))
    produce(any_url, dataset("kills_its_worker"), workers=1, shard_samples=40)
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_a_stopped_worker_gives_its_shard_back(any_url: str) -> None:
    """Hosts are taken away with SIGTERM: the worker ends in moments, its shard goes on elsewhere where it stopped."""
    leaving = Fleet(options_of(any_url), 1)
    (pid,) = leaving.pids
    took: list[float] = []

    def stop(look: ProductionProgress) -> None:
        if look.done and not took:
            began = time.monotonic()
            leaving.stop()
            took.append(time.monotonic() - began)

    asked = ProductionPlan(stream="train", source=dataset("very_slowly"), shard_samples=SAMPLES)
    helper: list[Fleet] = []
    with Production(asked, options_of(any_url), workers=0) as production:
        for look in production.run():
            stop(look)
            if took and not helper:
                helper.append(Fleet(options_of(any_url), 1))
    helper[0].stop()
    made_by = [int(sample["pid"]) for sample in read_epoch(any_url).values()]
    assert took[0] < 4
    assert made_by[0] == pid != made_by[-1]
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_a_broken_off_production_is_continued(any_url: str) -> None:
    """Ctrl-C, a reboot: the same command again makes what is missing, not everything."""
    asked = ProductionPlan(stream="train", source=dataset("slowly"), epochs=2, shard_samples=10)
    with Production(asked, options_of(any_url), workers=1) as production:
        for look in production.run():
            if look.done >= 20:
                break
    told: list[str] = []
    again = ProductionPlan(stream="train", source=dataset("slowly"), epochs=2)
    with Production(again, options_of(any_url), workers=2, notify=told.append) as production:
        assert production.epochs == (0, 1)
        list(production.run())
    assert "going on with epochs 0-1" in told[0]
    assert sorted(numbers_in(any_url)) == sorted(numbers_in(any_url, 1)) == list(range(SAMPLES))
    assert len({int(s["pid"]) for s in read_epoch(any_url).values()}) > 1


def test_workers_outlive_their_servers_restart(fresh_server: Callable[..., EmbeddedServer], tmp_path: Path) -> None:
    """A fleet on ten hosts must survive a restart of Redis."""
    server = fresh_server(appendonly=True, directory=tmp_path)
    fleet = Fleet(options_of(server.url), 1)
    try:
        produce(server.url, dataset(), workers=0)
        server.kill()
        again = fresh_server(appendonly=True, directory=tmp_path, port=server.port)
        produce(again.url, dataset(), workers=0, each=lambda look: fleet.poll())  # one busy just then is replaced
        assert sorted(numbers_in(again.url, 1)) == list(range(SAMPLES))
    finally:
        fleet.stop()


# --- what cannot be made ----------------------------------------------------------------------------------------------


def test_bad_samples_are_counted_named_and_add_up(url: str) -> None:
    """One broken file must not end an epoch, nor vanish from the books."""
    named: list[str] = []
    more: list[str] = []

    def note(seen: ProductionProgress) -> None:
        named.extend(seen.new_bad)
        more.extend(filter(None, [seen.more_bad]))

    summary = produce(url, dataset("every_tenth_fails"), each=note)
    assert more == ["penstock bad list train"], "the others are not named, so one line says where they are"
    samples = read_epoch(url)
    with redis.Redis.from_url(url) as client:
        bad = bad_count(client)
    assert (summary.samples, summary.bad, bad) == (SAMPLES, 12, 12)
    assert len(samples) + bad == SAMPLES
    assert any("is unlucky" in reason and "numbers[" in reason for reason in named)


def test_one_large_sample_does_not_count_for_all_that_follow(any_url: str) -> None:
    """The progress kept the largest mean, so it ended with several times the bytes of the summary."""
    with Writer("train", url=any_url, spec={"x": ("uint8", (None,))}) as writer, writer.epoch(0) as epoch:
        seen: list[EpochProgress] = []
        for size in (100_000, *[100] * 9):
            epoch.write({"x": np.zeros(size, np.uint8)})
            epoch.flush()
            seen.append(look(writer.client, writer.stream, epoch.manifest, seen[-1] if seen else None))
        assert [each.nbytes for each in seen] == [100_000 + 100 * number for number in range(10)]


def test_bad_samples_may_be_forbidden(any_url: str) -> None:
    """Some prefer no epoch to an incomplete one; the line names the sample."""
    with pytest.raises(EpochFailed, match=r"shard \d+ of epoch 0.*numbers\[\d*3\].*unlucky"):
        produce(any_url, dataset("every_tenth_fails"), on_error="fail")


def test_a_broken_transform_is_said_before_any_worker_starts(any_url: str) -> None:
    """The commonest mistake is answered first."""
    with pytest.raises(PenstockError, match=r"none of the first 100 samples can be made.*broken"):
        produce(any_url, dataset("always_fails"))


def test_a_sample_of_another_shape_fails_the_epoch_and_says_what_to_do(any_url: str) -> None:
    """A spec taken from the first sample may be too narrow; trainers must not wait for the rest."""
    with pytest.raises(EpochFailed, match=r"numbers\[119\].*--resize"):
        produce(any_url, dataset("grows"), shuffle=False)
    with redis.Redis.from_url(any_url, decode_responses=True) as client:
        assert client.hgetall("penstock:{train}:epochs") == {"0": "abandoned"}


# --- other shapes of source -------------------------------------------------------------------------------------------


def test_batches_are_cut_into_shards_whole(any_url: str) -> None:
    """A Keras Sequence makes a batch at once; one that fails costs its own samples only."""
    config = KerasConfig(name="tests.producer.made:Batches")
    summary = produce(any_url, config, shard_samples=20)
    assert (summary.samples, summary.bad) == (60, 8)
    labels = sorted(int(sample["y"]) for sample in read_epoch(any_url).values())
    assert labels == [n for n in range(60) if not 24 <= n < 32]


def test_a_generator_is_produced_in_its_order(any_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """An iterator has no length and no index: one job, and its end sizes the epoch."""
    summary = produce(any_url, GeneratorConfig(name="tests.producer.made:feed"))
    assert summary.samples == 50
    assert [int(sample["y"]) for sample in read_epoch(any_url).values()] == [n * n for n in range(50)]
    assert "come in the order in which the iterable gives them" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "shuffle"), [(GeneratorConfig(name="tests.producer.made:feed"), False), (dataset(), True)]
)
def test_only_an_iterable_that_was_to_be_shuffled_is_said_to_keep_its_order(
    any_url: str, source: SourceConfig, shuffle: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Epochs are shuffled by default, so an order that stays is a surprise. One that was asked for is none."""
    produce(any_url, source, shuffle=shuffle)
    assert "in the order in which" not in capfd.readouterr().err


# --- trust ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(any_url: str) -> Iterator[Fleet]:
    """One worker on the queue."""
    fleet = Fleet(options_of(any_url), 1)
    yield fleet
    fleet.stop()


def test_forged_jobs_are_refused_and_others_still_done(
    any_url: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A client that can write to the queue must not run code: no other function, no pickle, no callback."""
    trap = tmp_path / "trapped"
    with redis.Redis.from_url(any_url) as client:
        queue = Queue(QUEUE, connection=client, serializer=JSONSerializer)
        queue.enqueue("os.mkdir", str(trap))
        pickled = Queue(QUEUE, connection=client).enqueue("os.mkdir", str(trap))
        client.hset(pickled.key, "data", pickle.dumps(("os.mkdir", None, (str(trap),), {})))
        queue.enqueue("penstock_producer.working.jobs.produce_shard", x=1, on_failure=Callback("os.abort"))
        broken = queue.enqueue("penstock_producer.working.jobs.produce_shard")
        client.hset(broken.key, "timeout", "never")
    produce(any_url, dataset(), workers=1)
    told = capfd.readouterr().err
    assert not trap.exists()
    assert "names the function 'os.mkdir'" in told
    assert "not JSON" in told
    assert told.count("refused job") >= 3
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


NAME_OF_ALL_VERSIONS = "penstock_producer.working.jobs.produce_shard"
"""The name in every job since the first version, whatever module now has the function."""


def test_a_job_has_the_name_that_workers_of_older_versions_do(any_url: str) -> None:
    """A fleet is updated host by host: a worker of the older version refuses any other name."""
    asked = ProductionPlan(stream="train", source=dataset(), shard_samples=30)
    with Production(asked, options_of(any_url), workers=0) as production, redis.Redis.from_url(any_url) as client:
        production.enqueue_all()
        calls = [json.loads(zlib.decompress(client.hget(key, "data"))) for key in client.scan_iter("rq:job:*")]
        assert {tuple(call[:1]) for call in calls} == {(NAME_OF_ALL_VERSIONS,)}
        production.leave()


def test_a_job_that_an_older_version_queued_is_done(any_url: str) -> None:
    """Jobs outlive an update of their worker: the queue of the night before is made by the new version."""
    asked = ProductionPlan(stream="train", source=dataset(), shard_samples=SAMPLES)
    with Production(asked, options_of(any_url), workers=0) as production, redis.Redis.from_url(any_url) as client:
        production.enqueue_all()
        (key,) = client.scan_iter("rq:job:*")
        _, instance, positional, named = json.loads(zlib.decompress(client.hget(key, "data")))
        client.hset(key, "data", json.dumps([NAME_OF_ALL_VERSIONS, instance, positional, named]))
        helper = Fleet(options_of(any_url), 1)
        try:
            list(production.run())
        finally:
            helper.stop()
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_a_job_of_an_earlier_life_of_the_stream_is_refused(any_url: str, fleet: Fleet) -> None:
    """A stream that was deleted and made again has other contents, so an old job must not write to it."""
    asked = ProductionPlan(stream="train", source=dataset())
    with Production(asked, options_of(any_url), workers=0) as production:
        stale = production._planned.tasks(
            production._writer.stream.id, production._writer.epoch(0, sizes=[SAMPLES]).manifest
        )[0]
    dispatcher = Dispatcher(any_url, QUEUE)
    assert isinstance(stale, ShardTask)
    of_another = stale.model_copy(update={"manifest_id": "another"})
    dispatcher.enqueue([of_another])
    failed = _awaited(lambda: dispatcher.failure([of_another]))
    assert "is not the one this job was planned for" in failed[1]
    of_earlier = stale.model_copy(update={"stream_id": "another"})
    dispatcher.enqueue([of_earlier])
    failed = _awaited(lambda: dispatcher.failure([of_earlier]))
    assert "made again" in failed[1]
    dispatcher.close()


def test_a_job_of_an_epoch_that_is_cut_otherwise_than_its_source_is_refused(any_url: str, fleet: Fleet) -> None:
    """A program opened the epoch with fewer samples: all of its shards would be made, and the rest never missed."""
    with Production(ProductionPlan(stream="train", source=dataset()), options_of(any_url), workers=0) as production:
        manifest = production._writer.epoch(0, sizes=[SAMPLES - 20, 10]).manifest
        task = production._planned.tasks(production._writer.stream.id, manifest)[0]
    dispatcher = Dispatcher(any_url, QUEUE)
    dispatcher.enqueue([task])
    failed = _awaited(lambda: dispatcher.failure([task]))
    assert "epoch 0 of 'train' is cut otherwise than this source: it changed" in failed[1]
    dispatcher.close()


def test_a_job_of_a_source_that_is_not_the_workers_says_that_changed_code_needs_a_restart(
    any_url: str, fleet: Fleet
) -> None:
    """The same command again meets the same worker with its old module, and abandons one more epoch."""
    with Production(ProductionPlan(stream="train", source=dataset()), options_of(any_url), workers=0) as production:
        manifest = production._writer.epoch(0, sizes=[SAMPLES]).manifest
        task = production._planned.tasks(production._writer.stream.id, manifest)[0]
    task = task.model_copy(update={"fingerprint": "of newer code"})
    dispatcher = Dispatcher(any_url, QUEUE)
    dispatcher.enqueue([task])
    failed = _awaited(lambda: dispatcher.failure([task]))
    assert "restart `penstock worker` if code changed" in failed[1]
    dispatcher.close()


def _awaited(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


# --- back-pressure ----------------------------------------------------------------------------------------------------


def test_a_full_budget_is_explained_and_does_not_end_the_production(any_url: str) -> None:
    """No group reads yet, so the producer says so, keeps its progress, and continues when there is space."""
    told: list[str] = []
    small = ProductionPlan(
        stream="train", source=dataset(), shard_samples=10, budget_bytes=1500, block_bytes=250
    )  # 120 samples of 24 bytes are 2880
    with Production(small, options_of(any_url), workers=2) as production:
        for look in production.run():
            if look.waits:
                told.append(look.waits)
                break
        with redis.Redis.from_url(any_url) as client:
            client.hset("penstock:{train}:meta", "budget_bytes", 1 << 20)
        list(production.run())
    assert look.is_wait
    assert "no group reads it: start a trainer" in told[0]
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


@pytest.mark.parametrize("is_declared", [False, True])
def test_compression_of_an_unknown_tensor_costs_no_epoch(any_url: str, is_declared: bool) -> None:
    """A typing error failed in shard 0, and the stream's epoch 0 was abandoned."""
    spec = {"x": ("int32", (4,)), "pid": ("int64", ())} if is_declared else None
    with pytest.raises(BadSpec, match="compression names the tensor 'q'; the spec has x, pid"):
        produce(any_url, dataset(), compression="q=zstd", spec=spec)
    with connect(any_url) as client:
        stream = find_stream(client, "train")
        assert stream is None or retained_epochs(client, stream) == {}


def test_the_notice_of_a_worker_is_no_wait(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow generator was said to wait for the spec, which its first sample had given."""
    monkeypatch.setattr("penstock_producer.jobs.progress.STALL_S", 0.0)
    plan = ProductionPlan(stream="train", source=GeneratorConfig(name="tests.producer.made:slow_feed"))
    with Production(plan, options_of(any_url), workers=1) as production:
        told = [(look.waits, look.is_wait) for look in production.run() if "spec" in look.waits]
    assert set(told) == {("the spec of 'train' is taken from its first sample: x: int64", False)}


def test_a_production_broken_off_leaves_no_job_behind(any_url: str) -> None:
    """A job that waits for budget would block the next production's workers, and its own production has ended."""
    small = ProductionPlan(stream="train", source=dataset(), shard_samples=10, budget_bytes=1500, block_bytes=250)
    with Production(small, options_of(any_url), workers=1) as production:
        assert any(look.waits for look in production.run())
    with redis.Redis.from_url(any_url) as client:
        assert client.llen("rq:queue:penstock") == 0
        assert list(client.scan_iter("rq:job:*")) == []


def test_an_empty_string_is_no_dataset(any_server: EmbeddedServer) -> None:
    """A path given to penstock.produce would be a dataset of letters."""
    import penstock

    with pytest.raises(SourceError, match="penstock produce images DIR"):
        penstock.produce("photos/", url=any_server.url)


def test_a_production_that_is_broken_off_while_it_queues_jobs_takes_them_back(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes at any moment, also between the queue's answer and the note of what is in it."""
    enqueue = Dispatcher.enqueue

    def interrupted(self: Dispatcher, tasks: Iterable[ShardTask]) -> None:
        enqueue(self, tasks)
        assert len(self.known()) == 3
        raise KeyboardInterrupt

    monkeypatch.setattr(Dispatcher, "enqueue", interrupted)
    plan = ProductionPlan(stream="train", source=dataset(), shard_samples=-(-SAMPLES // 3))
    with (
        pytest.raises(KeyboardInterrupt),
        Production(plan, options_of(any_url), workers=0) as production,
    ):
        list(production.run())
    with closing(Dispatcher(any_url, QUEUE)) as dispatcher:
        assert dispatcher.known() == set()
