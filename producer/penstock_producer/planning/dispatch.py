"""Jobs as the dispatcher sees them: puts shards into the queue, finds the lost, hears of the failed.

When which epoch is due is ``production``'s; what a job says is ``task``'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock_common.errors import PenstockError, ServerUnavailable

try:
    from rq import Queue, Worker
except ModuleNotFoundError as error:
    if error.name != "rq":
        raise
    raise PenstockError('producing needs rq: pip install "penstock[producer]"') from None

from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus, Retry
from rq.registry import StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from penstock_common.stream.link.commands import Client
from penstock_common.stream.link.connection import connect
from penstock_common.waiting import Notify, to_stderr
from penstock_producer.working.jobs import FUNCTION, RETRIES, ShardJob
from penstock_producer.working.oversight import Death
from penstock_producer.working.task import ShardTask
from penstock_producer.working.worker import open_queue, return_jobs

SILENCE_S = 2.0
"""How long an answer may take that somebody needs who was told to end."""
AT_ONCE_S = 0.3
"""And where one has not come already."""
RESULT_TTL_S = 600
FAILURE_TTL_S = 86_400
SAMPLED = 8
"""Queued jobs looked at from either end, to know for which streams the queue works."""
LOST_AFTER = 2
"""A shard's job that is neither queued nor running at so many looks in a row is put into the queue again."""


@dataclass
class Reports:
    """What the jobs of some shards have noted."""

    nbytes: int = 0
    workers: set[str] = field(default_factory=set)
    waits: str = ""
    """Why one of them waits, if one does."""


def hurry(client: Client, patience_s: float) -> None:
    """For whoever ends: asks once whether the server answers, and where it does not, hardly waits for it any more."""
    client.hurry(patience_s, SILENCE_S)
    try:
        client.ping()
    except PenstockError:  # whatever else is to be told it would be waited for, one after the other
        client.hurry(0.0, AT_ONCE_S)


class Dispatcher:
    """One queue, as a producer of jobs. A server that goes away is waited for, and ``notify`` told so.

    What is asked may then be asked twice: a job that is queued twice finds its shard complete.
    """

    def __init__(self, queue_url: str, name: str, notify: Notify = to_stderr) -> None:
        self._client = connect(queue_url, bears_outages=notify)
        self._queue: Queue = open_queue(self._client, name)
        self._missed: dict[str, int] = {}

    def enqueue(self, tasks: Iterable[ShardTask], *, at_front: bool = False) -> None:
        """Queues one job per task, in order; ``at_front`` before all others, also in order."""
        jobs = [
            Queue.prepare_data(
                FUNCTION,
                kwargs=task.model_dump(mode="json"),
                job_id=task.job_id,
                timeout=-1,
                result_ttl=RESULT_TTL_S,
                failure_ttl=FAILURE_TTL_S,
                description=f"shard {task.shard} of epoch {task.epoch} of {task.stream!r}",
                retry=Retry(max=RETRIES, enqueue_at_front=True),
                at_front=at_front,
            )
            for task in tasks
        ]
        if jobs:  # each is pushed on its own: at the front the last one pushed comes first
            self._queue.enqueue_many(jobs[::-1] if at_front else jobs)

    def known(self) -> set[str]:
        """Ids of the jobs that are queued, just taken, or running."""
        return {*self._queue.get_job_ids(), *self.running()}

    def requeue_lost(self, tasks: Iterable[ShardTask], known: set[str]) -> int:
        """Queues unfinished shards whose job vanished: a worker died just as it took one, or the queue was emptied."""
        lost = []
        for task in tasks:
            missed = 0 if task.job_id in known else self._missed.get(task.job_id, 0) + 1
            self._missed[task.job_id] = missed
            if missed >= LOST_AFTER:
                lost.append(task)
                self._missed[task.job_id] = 0
        self.enqueue(lost, at_front=True)
        return len(lost)

    def clean(self) -> None:
        """Puts jobs of workers that are not heard of any more back into the queue; workers do the same."""
        StartedJobRegistry(queue=self._queue, job_class=ShardJob).cleanup()

    def return_jobs(self, death: Death) -> None:
        """Puts a dead worker's job back at once, and takes it off rq's list of workers."""
        return_jobs(self._queue, death)
        key = Worker.redis_worker_namespace_prefix + death.worker
        with self._queue.connection.pipeline() as pipe:
            pipe.srem(REDIS_WORKER_KEYS, key)
            pipe.srem(WORKERS_BY_QUEUE_KEY % self._queue.name, key)
            pipe.delete(key)
            pipe.execute()

    def hurry(self, patience_s: float) -> None:
        """From now on a server that is away is not waited for longer than this, and one that is silent is away."""
        hurry(self._client, patience_s)

    def failure(self, job_ids: set[str]) -> tuple[str, str] | None:
        """(what, why) of the first of these jobs that failed for good."""
        for job_id in self._queue.failed_job_registry.get_job_ids(cleanup=False):
            if job_id in job_ids and (job := self._fetch(job_id)) and job.get_status(refresh=False) == JobStatus.FAILED:
                assert isinstance(job, ShardJob)
                return str(job.description), str(job.meta.get("error") or job.why_lost())
        return None

    def reports(self, job_ids: Iterable[str]) -> Reports:
        """What these jobs have noted so far."""
        wanted = list(job_ids)
        reports = Reports()
        for job in ShardJob.fetch_many(wanted, connection=self._queue.connection, serializer=JSONSerializer):
            meta: dict[str, Any] = job.meta if job else {}
            reports.nbytes += int(meta.get("bytes", 0))
            reports.workers |= set(meta.get("workers", []))
            reports.waits = reports.waits or str(meta.get("waits", ""))
        return reports

    def running(self) -> set[str]:
        """Ids of the queue's jobs that workers have in hand."""
        registry = StartedJobRegistry(queue=self._queue, job_class=ShardJob)
        return {job_id for job_id, _ in registry.get_job_and_execution_ids(cleanup=False)}

    def streams(self) -> set[str]:
        """Names of the streams that jobs are for: of those running, and of the first and last ones queued."""
        wanted = {*self._queue.get_job_ids(0, SAMPLED), *self._queue.get_job_ids(-SAMPLED, SAMPLED), *self.running()}
        jobs = ShardJob.fetch_many(list(wanted), connection=self._queue.connection, serializer=JSONSerializer)
        return {str(job.kwargs["stream"]) for job in jobs if job is not None and "stream" in (job.kwargs or {})}

    def count_workers(self) -> int:
        """Workers that listen to this queue, wherever they are."""
        return Worker.count(queue=self._queue)

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Takes jobs out of the queue, with what it knows of them; running ones go on."""
        wanted = list(job_ids)
        for job_id in wanted:
            self._queue.remove(job_id)
        running = self.running()
        if left := [Job.key_for(job_id) for job_id in wanted if job_id not in running]:
            self._queue.connection.delete(*left)

    def forget(self, job_ids: Iterable[str]) -> tuple[set[str], Reports]:
        """Removes what ended jobs left on the server; their ids, and what they had noted.

        Their shards are known to be complete, and a production of many epochs must not leave a trail.
        """
        done: set[str] = set()
        reports = Reports()
        for job_id in job_ids:
            job = self._fetch(job_id)
            if job is not None and job.get_status(refresh=False) not in (JobStatus.FINISHED, JobStatus.FAILED):
                continue  # its worker is about to say so
            done.add(job_id)
            self._missed.pop(job_id, None)
            if job is not None:
                reports.nbytes += int(job.meta.get("bytes", 0))
                reports.workers |= set(job.meta.get("workers", []))
                # it may still list the run of a killed worker, whose own record expired: rq's delete would raise
                self._queue.connection.delete(job.execution_registry.key)
                job.delete(remove_from_queue=False)
                Result.delete_all(job)
        return done, reports

    def close(self) -> None:
        """Gives the connection back, and the queue's name where nobody uses it any more."""
        with suppress(ServerUnavailable):
            if not self._queue.count and not self.count_workers():
                self._queue.connection.srem(Queue.redis_queues_keys, self._queue.key)
        self._queue.connection.close()

    def _fetch(self, job_id: str) -> Job | None:
        try:
            return ShardJob.fetch(job_id, connection=self._queue.connection, serializer=JSONSerializer)
        except NoSuchJobError:
            return None
