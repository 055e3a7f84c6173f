"""Jobs as the dispatcher sees them: it queues shards, finds lost jobs and learns of failed ones.

`production` decides when an epoch is due. `task` has the fields of a job.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from typing import Any

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.explain.queues import SAMPLED
from penstock_common.extras import needed

with needed("rq", "producing"):
    from rq import Queue, Worker

from rq.job import Job, JobStatus, Retry
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from penstock_common.explain.queues import OWN_WORKER
from penstock_common.printable import printable
from penstock_common.server.connection import require_one_server
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client, Refused
from penstock_common.stream.servers.suitability import require_keeps_jobs
from penstock_common.waiting import AT_ONCE_S, Notify, to_stderr
from penstock_producer.jobs.allowlist import options_for
from penstock_producer.jobs.queue import (
    FAILURE_TTL_S,
    FUNCTION,
    RESULT_TTL_S,
    RETRIES,
    ShardJob,
    ShardQueue,
    open_queue,
    read_notes,
    records_of,
)
from penstock_producer.jobs.task import ShardTask, shown
from penstock_producer.jobs.watchdog import LOST_SERVER, STOPPED, WorkerDeath
from penstock_producer.jobs.worker import HEARTBEAT_TTL_S, QUEUE, return_jobs
from penstock_producer.sources.allowed import NotAllowed
from penstock_producer.sources.config import SourceConfig, parse_config

SILENCE_S = 2.0
"""The longest time that a process that must end waits for an answer."""
SHOWN_ERROR = 600
"""The most characters of an error that any program may have written into a job."""
WORKER_SILENCE_S = 5.0
"""A worker that makes a shard, and was not heard of for so long, may have been killed. It sends a heartbeat each 3 s.
"""
LOST_AFTER = 2
"""Looks in a row at which a shard's job is neither queued nor running, before it is queued again."""


@dataclass
class JobReports:
    """The sum of the notes of some shards' jobs."""

    nbytes: int = 0
    workers: set[str] = field(default_factory=set)
    waits: str = ""
    """The reason why one of them waits, if one does."""
    error: str = ""
    """The reason why a try of one of them failed, if one did."""
    failing: str = ""
    """The same of one that made no progress since."""

    def add(self, notes: Mapping[str, Any], *, is_done: bool = False) -> None:
        """Add the notes of a job. One that is done does not wait."""
        self.nbytes += int(notes.get("bytes", 0))
        self.workers |= set(notes.get("workers", []))
        if not is_done:
            self.waits = self.waits or str(notes.get("waits", ""))
            self.error = self.error or str(notes.get("error", ""))
            if notes.get("failures"):
                self.failing = self.failing or str(notes.get("error", ""))


def limit_patience(client: Client, patience_s: float) -> None:
    """Ask the server once for a process that must end. If no answer comes, later requests wait hardly at all."""
    client.limit_patience(patience_s, SILENCE_S)
    try:
        client.ping()
    except PenstockError:  # otherwise each further request would wait for it
        client.limit_patience(0.0, AT_ONCE_S)


def worker_command(source: SourceConfig, block_transform: str | None, queue: str) -> str:
    """Return the command that starts workers for a source's jobs, on any server. Raises NotAllowed."""
    words = ["penstock", "worker", *options_for(source, block_transform)]
    return shlex.join(words if queue == QUEUE else [*words, "--queue", queue])


class Dispatcher:
    """A producer of jobs for one queue. It waits for a server that goes away, and tells ``notify``.

    A request may then be sent twice: a job that is queued twice finds its shard complete.
    """

    def __init__(self, queue_url: str, name: str, notify: Notify = to_stderr, key: bytes | None = None) -> None:
        """Connect to a queue.

        With ``key``, only workers of its supervisor are believed when they say that a job failed.
        """
        self._notify, self._key = notify, key
        self._client = connect(queue_url, bears_outages=notify)
        require_one_server(
            self._client,
            "rq, which has the jobs, runs on one server only",
            "set PENSTOCK_QUEUE_URL (or --queue-url) to a server without `cluster-enabled yes`",
        )
        require_keeps_jobs(self._client)
        self._queue: ShardQueue = open_queue(self._client, name)
        self._missed: dict[str, int] = {}
        self._strangers: set[str] = set()
        """Workers of other programs that took jobs."""
        self.job_ids: set[str] = set()
        """The ids of this production's jobs that the queue's server still knows."""
        self._forgotten = JobReports()
        """The notes of those it forgot."""

    def track(self, tasks: Iterable[ShardTask]) -> None:
        """Count the jobs of these tasks as this production's."""
        self.job_ids.update(task.job_id for task in tasks)

    def enqueue(
        self, tasks: Iterable[ShardTask], *, notes: Iterable[dict[str, Any]] | None = None, at_front: bool = False
    ) -> None:
        """Queue one job for each task, in order, with the ``notes`` that it keeps.

        ``at_front`` puts them before all others, in the same order.
        """
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
                meta=meta,
            )
            for task, meta in zip(tasks, repeat({}) if notes is None else notes, strict=False)
        ]
        if jobs:  # pushed one at a time, so at the front the last one comes first
            ids = [str(job.job_id) for job in jobs]
            self._queue.asked(lambda: self._queue.enqueue_many(jobs[::-1] if at_front else jobs), self._notify, ids)

    def known(self) -> set[str]:
        """Return the ids of the jobs that are queued, just taken, or running."""
        return {*self._queue.asked(self._queue.get_job_ids, self._notify), *self.running()}

    def requeue_lost(self, tasks: Iterable[ShardTask], known: set[str]) -> int:
        """Queue unfinished shards whose job vanished: a worker died as it took one, or the queue was emptied."""
        lost = []
        for task in tasks:
            missed = 0 if task.job_id in known else self._missed.get(task.job_id, 0) + 1
            self._missed[task.job_id] = missed
            if missed >= LOST_AFTER:
                lost.append(task)
                self._missed[task.job_id] = 0
        self._renew(lost)
        return len(lost)

    def remove_forged(self, tasks: Iterable[ShardTask]) -> None:
        """Remove queued jobs that pretend to be of these tasks' epochs, and queue changed ones again as planned."""
        planned = {task.job_id: task for task in tasks}
        epochs = list({(task.stream_id, task.manifest_id) for task in planned.values()})
        changed: list[ShardTask] = []
        for job in self._queue.fetch_all(self._queue.asked(self._queue.get_job_ids, self._notify)):
            job_id = str(job.id)
            if job_id in planned:
                if not _is_as_planned(job, planned[job_id]):
                    changed.append(planned[job_id])
            elif (job.kwargs.get("stream_id"), job.kwargs.get("manifest_id")) in epochs:
                self._client.lrem(self._queue.key, 0, job_id)
                self._client.delete(Job.key_for(job_id))
                self._notify(
                    f"refused job {job_id}: this production never planned it; somebody else wrote it into queue "
                    f"{self._queue.name!r}, and it is removed"
                )
        self._renew_changed(changed)

    def _renew_changed(self, tasks: list[ShardTask]) -> None:
        for task in tasks:
            self._notify(
                f"refused job {task.job_id}: somebody else changed it in queue {self._queue.name!r}; it is queued "
                "again as it was planned"
            )
            self._client.lrem(self._queue.key, 0, task.job_id)
        self._renew(tasks)

    def failure(self, tasks: Iterable[ShardTask]) -> tuple[str, str] | None:
        """Return (what, why) of the first task whose job has no tries left. Queue the other failed jobs again.

        A failure is final if the job is as planned and a worker of Penstock reported the failure. A plain `rq worker`
        can run no job: it takes one after the other and lets it fail. A job of a silent host that another program
        abandoned has not failed either. Each failed job is read once: one that fails after this look is judged at the
        next look.
        """
        planned = {task.job_id: task for task in tasks}
        forged: list[ShardTask] = []
        unreported: list[tuple[ShardTask, str, dict[str, Any]]] = []
        final: tuple[str, str] | None = None
        for job in self._failed(set(planned)):  # one at a time, because a forged one may be large
            task = planned[str(job.id)]
            if not _is_as_planned(job, task):
                forged.append(task)
            elif not job.has_report(self._key):
                unreported.append((task, str(job.worker_name or ""), job.meta))
            elif final is None:
                final = str(job.description), str(job.meta.get("error") or job.why_lost())
        self._renew_changed(forged)
        for task, worker, notes in unreported:
            if OWN_WORKER.fullmatch(worker) and notes.get("told_by") == worker:
                self._tell_of_refusal(worker, task, str(notes.get("error")))
            else:
                self._tell_of_stranger(worker, task)
        self._renew([task for task, _, _ in unreported])
        return final

    def _renew(self, tasks: list[ShardTask]) -> None:
        """Queue jobs at the front as they were planned, with Penstock's notes, whatever happened to them."""
        if not tasks:
            return
        notes = [
            {name: note for name, note in known.items() if name not in ("told_by", "signature")}
            for known in read_notes(self._client, [task.job_id for task in tasks])
        ]
        with self._queue.connection.pipeline() as pipe:
            for task in tasks:
                pipe.delete(Job.key_for(task.job_id))
                pipe.zrem(self._queue.failed_job_registry.key, task.job_id)
            self._queue.asked(pipe.execute, self._notify)
        self.enqueue(tasks, notes=notes, at_front=True)

    def _tell_of_refusal(self, worker: str, task: ShardTask, error: str) -> None:
        """Repeat why a worker of another `penstock worker` could not do a job, once for each worker.

        It lacks the key of this production's own workers, so its report decides nothing.
        """
        if worker not in self._strangers:
            self._strangers.add(worker)
            self._notify(
                f"worker {shown(worker)!r}{self._process_of(worker)} of another `penstock worker` gave back job "
                f"{task.job_id} of queue {self._queue.name!r}: {printable(error[:SHOWN_ERROR])}; the job is queued "
                f"again, and counts as not tried; end that worker and {self._remedy(task)}, or give it another --queue"
            )

    def _process_of(self, worker: str) -> str:
        with suppress(Refused):
            key = Worker.redis_worker_namespace_prefix + worker
            host, pid = self._queue.connection.hmget(key, "hostname", "pid")
            if host and pid:
                return f" (process {shown(pid)} on {shown(host)})"
        return ""

    def _tell_of_stranger(self, worker: str, task: ShardTask) -> None:
        if not worker or OWN_WORKER.fullmatch(worker):  # for example, `rq info` abandons jobs of hosts that are silent
            worker = ""
        if worker in self._strangers:
            return
        self._strangers.add(worker)
        if not worker:
            self._notify(
                f"another program gave up job {task.job_id} of queue {self._queue.name!r} (`rq info` may, of a silent "
                "host); it is queued again, and counts as not tried"
            )
            return
        self._notify(
            f"worker {shown(worker)!r}{self._process_of(worker)} takes jobs of queue {self._queue.name!r} and cannot "
            f"do them: it is a plain `rq worker`, so end it and {self._remedy(task)}; its tries count against no job, "
            "and what it took is queued again"
        )

    def _remedy(self, task: ShardTask) -> str:
        try:
            return f"start `{worker_command(parse_config(task.source), task.block_transform, self._queue.name)}`"
        except NotAllowed:
            return "leave the jobs to the production's own workers"

    def clean(self) -> None:
        """Return jobs of workers that are silent to the queue. Workers do the same."""
        self._queue.asked(self._queue.clean_up, self._notify)

    def return_jobs(self, death: WorkerDeath) -> None:
        """Say how a worker died, return its job at once, and remove the worker from rq's list.

        A worker that had to end, or whose server went away, is not named.
        """
        if death.reason not in (STOPPED, LOST_SERVER):
            self._notify(f"{death.reason}; another takes its place and goes on with its shard")
        self._queue.asked(lambda: return_jobs(self._queue, death), self._notify)
        key = Worker.redis_worker_namespace_prefix + death.worker
        with self._queue.connection.pipeline() as pipe:
            pipe.srem(REDIS_WORKER_KEYS, key)
            pipe.srem(WORKERS_BY_QUEUE_KEY % self._queue.name, key)
            pipe.delete(key)
            self._queue.asked(pipe.execute, self._notify)

    def limit_patience(self, patience_s: float) -> None:
        """Wait no longer than this for a server that is away or silent, from now on."""
        limit_patience(self._client, patience_s)

    def _failed(self, job_ids: set[str]) -> Iterator[ShardJob]:
        failed = [job_id for job_id in self._queue.asked(self._queue.failed_ids, self._notify) if job_id in job_ids]
        return (job for job in self._queue.fetch_all(failed) if job.get_status(refresh=False) == JobStatus.FAILED)

    def reports(self, job_ids: Iterable[str]) -> JobReports:
        """Return the sum of what these jobs, and the forgotten ones, have noted so far."""
        reports = deepcopy(self._forgotten)
        for notes in read_notes(self._client, job_ids):
            reports.add(notes)
        return reports

    def running(self) -> set[str]:
        """Return the ids of the queue's jobs that workers have in hand."""
        return set(self._leases())

    def _leases(self) -> dict[str, float]:
        return self._queue.asked(self._queue.leases, self._notify)

    def silent(self, job_ids: Collection[str]) -> list[str]:
        """Return those of these jobs that a worker has in hand that was not heard of for `WORKER_SILENCE_S`."""
        return [job_id for job_id, left_s in self._leases().items() if job_id in job_ids and not _is_fresh(left_s)]

    def is_at_work(self, manifest_id: str) -> bool:
        """Return whether a worker with a recent heartbeat makes a shard of this epoch."""
        return any(_is_fresh(left_s) for job, left_s in self._leases().items() if job.startswith(f"{manifest_id}-"))

    def streams(self) -> set[str]:
        """Return the names of the streams that jobs are for: of the running ones, and of the first and last queued
        ones.
        """
        ends = ((0, SAMPLED), (-SAMPLED, SAMPLED))
        queued = self._queue.asked(lambda: [self._queue.get_job_ids(*end) for end in ends], self._notify)
        wanted = {*queued[0], *queued[1], *self.running()}
        return {str(job.kwargs["stream"]) for job in self._queue.fetch_all(wanted) if "stream" in (job.kwargs or {})}

    def count_workers(self) -> int:
        """Return how many workers of Penstock listen to this queue, on any host."""
        key = WORKERS_BY_QUEUE_KEY % self._queue.name
        names: set[Any] = self._queue.asked(lambda: self._client.smembers(key), self._notify)
        return sum(OWN_WORKER.fullmatch(name.decode("utf-8", "replace")) is not None for name in names)

    def heard_of(self, host: str) -> list[float]:
        """Return how many seconds ago each worker of this ``host`` sent its heartbeat to the queue."""
        key, own = WORKERS_BY_QUEUE_KEY % self._queue.name, f"{Worker.redis_worker_namespace_prefix}{host}.".encode()
        names: set[Any] = self._queue.asked(lambda: self._client.smembers(key), self._notify)
        mine = [name for name in names if name.startswith(own)]
        beats: list[Any] = self._queue.asked(
            lambda: [self._client.hget(name, "last_heartbeat") for name in mine], self._notify
        )
        ages, now = [], datetime.now(UTC)
        for beat in beats:
            with suppress(ValueError, TypeError, AttributeError):  # no time with a zone, or the worker is gone
                ages.append((now - datetime.fromisoformat(beat.decode())).total_seconds())
        return ages

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Remove jobs from the queue, with its records of them. Running ones continue."""
        wanted = list(job_ids)
        self._queue.asked(
            lambda: [self._queue.connection.lrem(self._queue.key, 1, each) for each in wanted], self._notify
        )
        running = self.running()
        if left := [Job.key_for(job_id) for job_id in wanted if job_id not in running]:
            self._queue.connection.delete(*left)

    def forget(self, but: Iterable[str] = ()) -> None:
        """Remove what this production's ended jobs left on the server, except the ids of ``but``. Keep their notes.

        Their shards are known to be complete, and a production of many epochs must not leave a trail.
        """
        for job_id in self.job_ids.difference(but):
            job = self._queue.fetch(job_id)
            if job is not None and job.get_status(refresh=False) not in (JobStatus.FINISHED, JobStatus.FAILED):
                continue  # its worker is about to report it
            self._queue.asked(partial(self._remove, job_id), self._notify)
            self.job_ids.discard(job_id)
            self._missed.pop(job_id, None)
            if job is not None:
                self._forgotten.add(job.meta, is_done=True)

    def _remove(self, job_id: str) -> None:
        """Remove everything that rq and Penstock keep of a job."""
        key = Job.key_for(job_id)
        with self._queue.connection.pipeline() as pipe:
            pipe.zrem(self._queue.finished_job_registry.key, job_id)
            pipe.zrem(self._queue.failed_job_registry.key, job_id)
            pipe.delete(key, f"{key}:dependents", f"{key}:dependencies", *records_of(job_id))
            pipe.execute()

    def close(self) -> None:
        """Close the connection, and remove the queue's name if no process uses it any more."""
        with suppress(ServerUnavailable, Refused):
            if not self._queue.count and not self.count_workers():
                self._queue.connection.srem(Queue.redis_queues_keys, self._queue.key)
        self._queue.connection.close()


def _is_fresh(left_s: float) -> bool:
    return left_s > HEARTBEAT_TTL_S - WORKER_SILENCE_S


def _is_as_planned(job: ShardJob, task: ShardTask) -> bool:
    return bool(job.kwargs == task.model_dump(mode="json"))
