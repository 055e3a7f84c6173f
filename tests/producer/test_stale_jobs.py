"""Jobs whose shard is complete already: a worker died between the last commit and saying so, or two had the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pytest
from redis import Redis
from rq.job import JobStatus

from penstock_common.stream.removal.deletion import release_epoch
from penstock_producer.jobs.dispatch import LOST_AFTER, Dispatcher
from penstock_producer.jobs.fill import FillStopped
from penstock_producer.jobs.fleet import Fleet
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import EpochStage, Production
from penstock_producer.jobs.queue import RETRIES, ShardJob
from penstock_producer.jobs.watchdog import WorkerDeath
from penstock_producer.jobs.worker import QUEUE
from tests.producer.made import SAMPLES
from tests.producer.test_jobs import PATIENCE_S, dataset, numbers_in, options_of
from tests.producer.test_trust import TASK

Found = TypeVar("Found")


def awaited(look: Callable[[], Found]) -> Found:
    """Return what ``look`` finds, as soon as it finds something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@contextmanager
def elsewhere(url: str) -> Iterator[None]:
    """A worker that does what anyone queues; a production's own ones would not touch such jobs."""
    fleet = Fleet(options_of(url), 1)
    try:
        yield
    finally:
        fleet.stop()


def is_forgotten(dispatcher: Dispatcher) -> bool:
    """Forget ended jobs. Return whether that was all of them."""
    dispatcher.forget()
    return not dispatcher.job_ids


def test_a_job_of_an_epoch_that_was_read_and_released_has_nothing_to_do(any_url: str) -> None:
    """Trainers were quick, and the budget small: the job comes back when its epoch is gone, and must not fail."""
    with Production(ProductionPlan(stream="train", source=dataset()), options_of(any_url), workers=0) as production:
        writer, dispatcher, fleet = production._writer, Dispatcher(any_url, QUEUE), Fleet(options_of(any_url), 1)
        try:
            stale = production._planned.tasks(writer.stream.id, writer.epoch(0, sizes=[SAMPLES]).manifest)[0]
            assert release_epoch(writer.client, writer.stream, 0)
            dispatcher.track([stale])
            dispatcher.enqueue([stale])
            awaited(lambda: dispatcher.failure([stale]) or is_forgotten(dispatcher))
            assert dispatcher.failure([stale]) is None
        finally:
            fleet.stop()
            dispatcher.close()


def test_a_job_of_a_deleted_stream_names_the_deletion(any_url: str) -> None:
    """Its worker blamed the address alone, which was right."""
    dispatcher = Dispatcher(any_url, QUEUE)
    with elsewhere(any_url):
        dispatcher.enqueue([TASK])
        failure = awaited(lambda: dispatcher.failure([TASK]))
    dispatcher.close()
    assert failure is not None
    assert "stream 'train' was deleted, or is on another server than this worker's: then give --url" in failure[1]


def test_what_fails_of_a_complete_epoch_does_not_end_the_production(any_url: str) -> None:
    """A second run of a shard that is there may find its source changed, or its epoch gone in its midst; so what?"""
    plan = ProductionPlan(stream="train", source=dataset("slowly"), epochs=2, shard_samples=30)
    with elsewhere(any_url), Production(plan, options_of(any_url), workers=0) as production:
        dispatcher, deadline, failed = production._dispatcher, time.monotonic() + PATIENCE_S, ""
        first = ""
        for look in production.run():
            first = first or production._runs[0].tasks[0].job_id
            if not failed and production._runs[0].stage is EpochStage.FINISHED and first in dispatcher.job_ids:
                changed = production._runs[1].tasks[0].model_copy(update={"fingerprint": "another", "shard": 99})
                dispatcher.enqueue([changed], at_front=True)
                failed = changed.job_id
                dispatcher.job_ids.add(failed)
                awaited(partial(dispatcher.failure, [changed]))
            assert time.monotonic() < deadline, look
        assert failed
        production.summary()
        assert failed not in dispatcher.job_ids, "nothing of it is left on the server"
    assert sorted(numbers_in(any_url, 1)) == list(range(SAMPLES))


def test_a_lost_job_that_was_queued_again_is_lost_again_only_after_as_many_looks(any_url: str) -> None:
    """A worker has it in hand for a moment that no look sees: queued at each look, it would be run twice."""
    dispatcher = Dispatcher(any_url, "penstock")
    assert [dispatcher.requeue_lost([TASK], set()) for _ in range(2 * LOST_AFTER)] == [0, 1, 0, 1]
    assert dispatcher.known() == {TASK.job_id}
    dispatcher.close()


def test_a_death_that_is_no_fault_of_the_shard_counts_for_nothing() -> None:
    """Hosts are preempted while trainers are slow: counted, fifteen of them would fail a good shard."""
    job = ShardJob("a", connection=Redis())
    job.meta, job.retries_left = {}, 1
    job.lose_worker(WorkerDeath("w", "killed", is_to_blame=False))
    assert (job.meta, job.retries_left) == ({}, 2)
    job.lose_worker(WorkerDeath("w", "killed"))
    assert (job.meta["deaths"], job.retries_left) == (1, 3)


def test_two_producers_may_forget_one_job_at_once(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see it finished; rq's own removal asks for its status once more, and raises where the other was faster."""
    ours, theirs = Dispatcher(any_url, QUEUE), Dispatcher(any_url, QUEUE)
    fetch = ours._queue.fetch

    def fetched(job_id: str) -> ShardJob | None:
        job = fetch(job_id)
        assert is_forgotten(theirs)
        return job

    for dispatcher in (ours, theirs):
        dispatcher.track([TASK])
    ours.enqueue([TASK])
    job = fetch(TASK.job_id)
    assert job is not None
    job.set_status(JobStatus.FINISHED)
    monkeypatch.setattr(ours._queue, "fetch", fetched)
    assert is_forgotten(ours)
    for dispatcher in (ours, theirs):
        dispatcher.close()


def test_a_worker_that_is_stopped_in_a_jobs_last_try_costs_it_nothing(any_url: str) -> None:
    """Hosts are preempted at any time. A shard that failed before would otherwise fail permanently, with its epoch."""
    dispatcher = Dispatcher(any_url, QUEUE)
    dispatcher.enqueue([TASK])
    job = dispatcher._queue.fetch(TASK.job_id)
    assert job is not None
    for _ in range(RETRIES):
        job.count_failure()
    job.save_meta()  # type: ignore[no-untyped-call]
    job = dispatcher._queue.fetch(TASK.job_id)
    assert job is not None
    assert not job.should_retry, "this is its last try"
    job.judge(FillStopped())
    assert job.should_retry
    assert job.meta["failures"] == RETRIES
    dispatcher.close()


def test_a_job_that_runs_is_not_forgotten_with_those_that_are_cancelled(any_url: str, any_client: Redis) -> None:
    """Its worker goes on, and what it notes of a job that is gone would stay on the server for ever."""
    dispatcher, queued = Dispatcher(any_url, QUEUE), TASK.model_copy(update={"shard": 1})
    dispatcher.enqueue([TASK, queued])
    any_client.lrem("rq:queue:penstock", 1, TASK.job_id)
    any_client.zadd("rq:wip:penstock", {f"{TASK.job_id}:run": 1e12})
    dispatcher.cancel([TASK.job_id, queued.job_id])
    assert dispatcher.known() == {TASK.job_id}
    assert dispatcher._queue.fetch(TASK.job_id) is not None
    assert dispatcher._queue.fetch(queued.job_id) is None
    dispatcher.close()
