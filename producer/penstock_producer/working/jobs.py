"""The one function that jobs may name, and the Job class that refuses every other before anything is imported.

What the function does is ``workbench``'s; the process it runs in is ``worker``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, Retry, get_current_job
from rq.serializers import JSONSerializer

from penstock_common.errors import BudgetFull, PenstockError, ServerUnavailable, SourceError
from penstock_common.waiting import to_stderr
from penstock_producer.working.fill import Stopped
from penstock_producer.working.oversight import Death, Suspicion, suspect
from penstock_producer.working.task import ShardTask
from penstock_producer.working.workbench import Made, SourceChanged, Workbench

FUNCTION = "penstock_producer.working.jobs.produce_shard"
"""The name every job carries."""
RETRIES = 4
"""Runs beyond the first, for what another try may mend: a lost connection, a dead worker, a host without files. A run
that commits something gives the job all of them again: what counts is how many in a row got nowhere."""
PAUSES_S = (0.0, 0.5, 2.0, 5.0)
"""Before a failed job goes back to the queue; rq's own intervals would need its scheduler process."""
DEATHS = 15
"""Workers killed in a row without any progress before their shard fails: a machine short of memory, or an impatient
operator, kills some by chance. A sample that kills whoever makes it is found out before (oversight.py)."""
MENDED_BY_RETRY = (ServerUnavailable, SourceError, OSError, MemoryError)
ENDLESS = 1 << 30
PASS_ON_S = 3.0
"""A job that waits for room looks this often whether an earlier shard has nobody to make it, and then makes place."""

_bench: Workbench | None = None


def set_workbench(bench: Workbench) -> None:
    """Say with what this process does its jobs."""
    global _bench  # noqa: PLW0603 - rq calls a function by name: it has no other way to reach the process's state
    _bench = bench


def produce_shard(**arguments: Any) -> dict[str, int] | Retry:
    """Writes what is missing of one shard.

    One that finds no room for a lease goes to the back of the queue, and the shards that have room before it to the
    front: a single worker must not wait in one shard for another that only it could make.
    """
    assert _bench is not None, "produce_shard runs in a penstock worker only"
    task = ShardTask.parse(arguments)
    job = get_current_job()
    assert job is not None
    made = Made()
    note = _Note(job)
    _bench.suspects = Suspicion.of(job.meta)
    try:
        _bench.produce(task, made, note.waits, lambda: note.keep(made), _Yielding(job, _bench, task), note.is_at)
    except BudgetFull as error:
        if _bench.is_stopping:
            raise Stopped from None  # back to the front: it did not give up its turn
        note.waits(str(error))
        bring_forward(_queue_of(job), _bench.earlier_jobs(task))
        return Retry(max=ENDLESS)
    return {"good": made.good, "bad": made.bad}


class _Yielding:
    """Asked while a job waits for room: whether an earlier shard lies in the queue, which nobody then works at."""

    def __init__(self, job: Job, bench: Workbench, task: ShardTask) -> None:
        self._job, self._bench, self._task = job, bench, task
        self._looked_s = time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._looked_s < PASS_ON_S:
            return False
        self._looked_s = now
        return not set(self._bench.earlier_jobs(self._task)).isdisjoint(_queue_of(self._job).get_job_ids())


def bring_forward(queue: Queue, job_ids: Sequence[str]) -> None:
    """Moves those of the jobs that are queued to the front, in this order and in one step: none is ever missing."""

    def move(pipe: Any) -> None:
        queued = {job_id.decode() for job_id in pipe.lrange(queue.key, 0, -1)}
        pipe.multi()
        for job_id in reversed(job_ids):
            if job_id in queued:
                pipe.lrem(queue.key, 1, job_id)
                pipe.lpush(queue.key, job_id)

    if job_ids:
        queue.connection.transaction(move, queue.key)


def _queue_of(job: Job) -> Queue:
    return Queue(job.origin, connection=job.connection, job_class=ShardJob, serializer=JSONSerializer)


class _Note:
    """What the dispatcher wants to know of a job, in the job's meta: who did it, how many bytes, what it waits for.

    And how far its shard was when a run last showed that it gets on.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_told = False
        """This run has shown that it gets on."""
        self._began_at: int | None = None
        job.meta["workers"] = sorted({*job.meta.get("workers", []), job.worker_name})  # saved with what comes next

    def waits(self, text: str) -> None:
        self._job.meta["waits"] = text
        _save_meta(self._job)

    def is_at(self, committed: int) -> None:
        """So much of the shard is committed; the first time in a run that this is news, it is noted."""
        if self._is_told or committed == self._began_at:
            return
        self._is_told, self._began_at = self._began_at is not None, committed
        if committed <= int(self._job.meta.get("at", 0)):
            return
        self._job.meta["at"] = committed
        # some run got on since this was last noted, be it this one or one that was killed
        self._job.meta.pop("deaths", None)
        if self._job.retries_left != RETRIES:
            self._job.retries_left = RETRIES
            with suppress(ServerUnavailable):
                self._job.connection.hset(self._job.key, "retries_left", RETRIES)
        _save_meta(self._job)

    def keep(self, made: Made) -> None:
        self._job.meta["bytes"] = made.nbytes
        self._job.meta.pop("waits", None)
        _save_meta(self._job)


class ShardJob(Job):
    """A job that can only be `produce_shard` with JSON arguments: no other function, no callbacks, no web hooks."""

    def restore(self, raw_data: Any) -> Any:
        """Refuse what is not ours while it is loaded: for rq it is then no job at all, and is passed over."""
        try:
            super().restore(raw_data)
            reason = _refusal(self)
        except NoSuchJobError:
            raise
        except Exception as error:
            reason = f"it cannot be read ({type(error).__name__})"
        if reason:
            to_stderr(f"refused job {self.id}: {reason}; this worker only runs {FUNCTION}")
            raise NoSuchJobError(f"refused: {reason}")

    def heartbeat(self, timestamp: Any, ttl: int, pipeline: Any = None, xx: bool = False) -> None:
        """As rq's, but not by itself, at the job's end: what says that it ended comes at once."""
        if pipeline is not None:
            super().heartbeat(timestamp, ttl, pipeline, xx)

    @property
    def func(self) -> Callable[..., Any]:
        """Never imported by name."""
        return produce_shard

    @property
    def success_callback(self) -> None:
        """None whatever the job says."""
        return

    @property
    def failure_callback(self) -> None:
        """None whatever the job says."""
        return

    @property
    def stopped_callback(self) -> None:
        """None whatever the job says."""
        return

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """None whatever the job says."""

    def why_lost(self, reason: str = "its worker was not heard of any more") -> str:
        """Why it fails for good, where workers died of it: what befell the last one, and where all got no further."""
        return (
            f"{reason}, the last of {self.meta.get('deaths', RETRIES + 1)} in a row that got no further than sample "
            f"{self.meta.get('at', 0)} of this shard: see what kills them (memory? a crash in the transform?)"
        )

    def lose_worker(self, death: Death) -> None:
        """Its worker died: costs it no retry, but too many deaths in a row cost it all."""
        if death.is_to_blame:
            self.meta["deaths"] = int(self.meta.get("deaths", 0)) + 1
            suspect(self.meta, death)
        is_hopeless = int(self.meta.get("deaths", 0)) >= DEATHS
        self.retries_left = 0 if is_hopeless else (self.retries_left or 0) + 1

    def judge(self, error: BaseException) -> None:
        """Notes why a run failed, and whether another run may help; rq then does what ``retries_left`` says."""
        text = " ".join(str(error).split()) or type(error).__name__
        self.meta["error"] = text if isinstance(error, PenstockError) else f"{type(error).__name__}: {text}"
        _save_meta(self)
        left = self.retries_left or 0
        if isinstance(error, Stopped):
            self.retries_left = left + 1  # not its fault
        elif not isinstance(error, MENDED_BY_RETRY) or isinstance(error, SourceChanged):
            self.retries_left = 0
        else:
            time.sleep(PAUSES_S[max(0, min(len(PAUSES_S) - 1, RETRIES - left))])


def _refusal(job: Job) -> str:
    try:
        name, instance, arguments = job.func_name, job.instance, job.args
    except Exception:
        return "its data is not JSON"
    if name != FUNCTION:
        return f"it names the function {name!r}"
    return "it carries an object or positional arguments" if instance is not None or arguments else ""


def _save_meta(job: Job) -> None:
    with suppress(ServerUnavailable):  # a note is not worth a job, least of all the one that its server is away
        job.save_meta()  # type: ignore[no-untyped-call]
