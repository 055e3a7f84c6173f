"""Jobs on the queue's server: the one function that they may name, and a queue that survives foreign entries.

What other programs leave in a job or in rq's keys ends no process that reads it. `task_runner` is what the function
does, `worker` the process that it runs in, and `task` the fields that a job may have.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus, Retry, get_current_job
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from penstock_common.errors import (
    BudgetFull,
    DurabilityLost,
    PenstockError,
    ServerUnavailable,
    SourceError,
    Unauthorized,
)
from penstock_common.stream.commands import Refused
from penstock_common.waiting import WAITING, Notify
from penstock_producer.jobs.fill import FillStopped
from penstock_producer.jobs.task import LIMITS, ShardTask, UnreadableField, checked, readable_meta, shown
from penstock_producer.jobs.task_runner import JobReport, LoginRefused, ShardLost, SourceChanged, TaskRunner
from penstock_producer.jobs.watchdog import CrashRecord, WorkerDeath, note_crash, sign
from penstock_producer.sources.generator import BrokenIterable

FUNCTION = "penstock_producer.working.jobs.produce_shard"
"""The name that every job carries in the queue. It is no import path: `ShardJob.func` gives the function for it.

Dispatchers and workers of other versions write and expect this name, so it stays when the code moves."""
RETRIES = 4
"""Runs after the first, for errors that another try may cure: a lost connection, a dead worker, a host without files. A
run that commits something gives the job all of them again, so only runs without progress count."""
PAUSES_S = (0.0, 0.5, 2.0, 5.0)
"""Pauses before a failed job goes back to the queue. rq's own intervals would need its scheduler process."""
DEATHS = 15
"""Workers that may be killed in a row without any progress before their shard fails. A machine short of memory, or an
impatient operator, kills some by chance. The watchdog finds a sample that kills workers before that."""
CURED_BY_RETRY = (ServerUnavailable, ShardLost, SourceError, OSError, MemoryError, Refused)
ENDLESS = 1 << 30
RESULT_TTL_S = 600
FAILURE_TTL_S = 86_400
OTHERS_S = 0.25
"""The pause of a worker that found only jobs of other productions."""
PASS_ON_S = 3.0
"""The time between two checks of a job that waits for quota. It makes way if an earlier shard has no worker."""

SET_ASIDE: Final = ":set-aside"
"""The end of the name of a key that had the wrong type."""
SET_ASIDE_TTL_S: Final = 86_400
TRIES: Final = 3
"""The number of further tries of a command after a key of another type prevented it."""
JOBS_PAGE: Final = 1000
"""Jobs that are read at once. Any number may be listed, and each request is a round trip."""
READ_BYTES: Final = 8 << 20
"""Bytes of jobs that are read at once, as they lie on the server. A job that is larger is read alone."""
ABANDONED: Final = "its worker was not heard of any more"
"""The reason why a job of a silent host is returned."""
_JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")
MOST_REFUSED: Final = 1000
"""The number of refused jobs that a process remembers having reported."""

T = TypeVar("T")

_Lengths: TypeAlias = tuple[str, dict[str, int]]
"""A job's key, and the length of each field there."""

Check: TypeAlias = Callable[[ShardTask], bool | None]
"""A check that raises for a task that may not be done, and returns False for one that other workers may do."""

_runner: tuple[TaskRunner, Check, bytes] | None = None


_met: list[str] = []
"""The foreign jobs that this process returned since it last did a job of its own or rested."""


def set_task_runner(runner: TaskRunner, check: Check, key: bytes) -> None:
    """Set what does this process's jobs, the check of their tasks, and the key with which its supervisor signs."""
    global _runner  # noqa: PLW0603 - rq calls a function by name: it has no other way to reach the process's state
    _runner = runner, check, key


def produce_shard(**arguments: Any) -> dict[str, int] | Retry:
    """Write what is missing of one shard.

    A task is checked before anything is imported or opened. A job of others goes to the back of the queue untouched. A
    job that waits for quota longer than a lease goes back, too, and the shards before it go to the front. Otherwise a
    single worker would wait in one shard for another shard that only it can make.
    """
    assert _runner is not None, "produce_shard runs in a penstock worker only"
    runner, check, key = _runner
    task = ShardTask.parse(arguments)
    job = get_current_job()
    assert isinstance(job, ShardJob)
    if check(task) is False:
        _met.append(str(job.id))
        return Retry(max=ENDLESS)
    _met.clear()
    report = _JobNote(job, runner, task, key)
    try:
        runner.produce(task, report)
    except (BudgetFull, DurabilityLost) as error:
        if runner.is_stopping:
            raise FillStopped from None  # it goes to the front, because it keeps its turn
        report.waits(f"{WAITING}{error}")
        bring_forward(open_queue(job.connection, job.origin), runner.earlier_jobs(task))
        return Retry(max=ENDLESS)
    return {"good": report.good, "bad": report.bad}


def should_rest() -> bool:
    """Return whether this process has met the same foreign job again: then no queued job is its own.

    Its worker rests with no job in hand, so that the producer finds a job that another program changed in the queue.
    """
    if len(_met) == len(set(_met)):
        return False
    _met.clear()
    return True


def bring_forward(queue: Queue, job_ids: Sequence[str]) -> None:
    """Move those of the jobs that are queued to the front, in this order. It is one step, so none is ever missing."""

    def move(pipe: Any) -> None:
        queued = set(pipe.lrange(queue.key, 0, -1))
        pipe.multi()
        for job_id in reversed(job_ids):
            if job_id.encode() in queued:
                pipe.lrem(queue.key, 1, job_id)
                pipe.lpush(queue.key, job_id)

    if job_ids:
        queue.connection.transaction(move, queue.key)


class _JobNote(JobReport):
    """The report of a job in its meta, for the dispatcher: its workers, its bytes, and what it waits for.

    It also notes how far the shard was when a run last made progress.
    """

    def __init__(self, job: ShardJob, runner: TaskRunner, task: ShardTask, key: bytes) -> None:
        super().__init__(CrashRecord.of(job.meta, str(job.id), key))
        self._job, self._runner, self._task = job, runner, task
        self._looked_s = time.monotonic()
        self._is_reported = False
        """Whether this run has noted progress."""
        self._began_at: int | None = None
        job.meta["workers"] = sorted({*job.meta.get("workers", []), job.worker_name})  # the next write saves it

    def waits(self, text: str) -> None:
        self._job.meta["waits"] = text
        _save_meta(self._job)

    def is_at(self, committed: int) -> None:
        """Note how many samples of the shard are committed, the first time that a run has made progress."""
        if self._is_reported or committed == self._began_at:
            return
        self._is_reported, self._began_at = self._began_at is not None, committed
        if committed <= int(self._job.meta.get("at", 0)):
            return
        self._job.got_on(committed)

    def is_committed(self, nbytes: int) -> None:
        super().is_committed(nbytes)
        self._job.meta["bytes"] = nbytes
        self._job.meta.pop("waits", None)
        _save_meta(self._job)

    def should_yield(self) -> bool:
        """Return whether an earlier shard is queued, which no worker does."""
        now = time.monotonic()
        if now - self._looked_s < PASS_ON_S:
            return False
        self._looked_s = now
        queued = open_queue(self._job.connection, self._job.origin).get_job_ids()
        return not set(self._runner.earlier_jobs(self._task)).isdisjoint(queued)


class ShardJob(Job):
    """A job that can only be `produce_shard` with JSON arguments. `task.checked` leaves out its callbacks and hooks."""

    def refresh(self) -> None:
        """Read the job. Raises NoSuchJobError if there is none that may run."""
        self.restore(next(_read(self.connection, [self.key])))

    def restore(self, raw_data: Any) -> Any:
        """Take over what the server answers. Raises NoSuchJobError for a foreign job, so that rq skips it."""
        if not raw_data:
            raise NoSuchJobError(f"no job {self.id}")
        try:
            super().restore(checked(raw_data, FUNCTION))
        except UnreadableField as error:
            _refuse(str(self.id), str(error))
            raise NoSuchJobError(f"refused: {error}") from None
        self.timeout, self.result_ttl, self.failure_ttl = -1, RESULT_TTL_S, FAILURE_TTL_S
        self.retries_left = max(0, RETRIES - int(self.meta.get("failures", 0)))

    def heartbeat(self, timestamp: Any, ttl: int, pipeline: Any = None, xx: bool = False) -> None:
        """Do what rq does, but not as a request of its own at the job's end: the report of the end follows at once."""
        if pipeline is not None:
            super().heartbeat(timestamp, ttl, pipeline, xx)

    @property
    def func(self) -> Callable[..., Any]:
        """The function, which is never imported by name."""
        return produce_shard

    def why_lost(self, reason: str = ABANDONED) -> str:
        """Return why a job fails whose workers died: what ended the last one, and where all of them stopped."""
        return (
            f"{reason}, the last of {self.meta.get('deaths', RETRIES + 1)} in a row that committed no more than "
            f"{self.meta.get('at', 0)} samples of this shard: see what kills them (memory? a crash in your code?)"
        )

    def lose_worker(self, death: WorkerDeath) -> None:
        """Note that its worker died. It costs no retry, but too many deaths in a row fail the job."""
        if death.is_to_blame:
            self.meta["deaths"] = int(self.meta.get("deaths", 0)) + 1
            note_crash(self.meta, death, str(self.id))
        is_hopeless = int(self.meta.get("deaths", 0)) >= DEATHS
        self.retries_left = 0 if is_hopeless else (self.retries_left or 0) + 1

    def judge(self, error: BaseException) -> None:
        """Note why a run failed and whether another run may help. rq then acts on ``retries_left``."""
        left = self.retries_left or 0
        if isinstance(error, FillStopped | LoginRefused):
            self.retries_left = left + 1  # the job is not to blame
        elif not isinstance(error, CURED_BY_RETRY) or isinstance(error, SourceChanged | BrokenIterable | Unauthorized):
            self.retries_left = 0
        else:
            self.count_failure()
        if isinstance(error, ShardLost):
            self.meta["at"] = error.committed  # what comes after it counts as progress again
        text = " ".join(str(error).split()) or type(error).__name__
        self.tell(
            text if isinstance(error, PenstockError) else f"{type(error).__name__}: {text}",
            _runner[2] if _runner else b"",
        )
        _save_meta(self)
        if self.retries_left and not isinstance(error, FillStopped | LoginRefused):
            time.sleep(PAUSES_S[max(0, min(len(PAUSES_S) - 1, RETRIES - left))])

    def got_on(self, committed: int) -> None:
        """Note how far the shard is. Some run made progress since the last note: this one, or one that was killed."""
        self.meta["at"] = committed
        self.meta.pop("deaths", None)
        self.meta.pop("failures", None)
        self.retries_left = RETRIES
        _save_meta(self)

    def count_failure(self) -> None:
        """Note a try that failed. Other programs change rq's own count when they touch the job."""
        self.meta["failures"] = int(self.meta.get("failures", 0)) + 1

    def tell(self, error: str, key: bytes = b"") -> None:
        """Note why a try failed. The supervisor's key signs the note, which shows that its worker wrote it."""
        self.meta["error"], self.meta["told_by"] = error, str(self.worker_name or "")
        self.meta["signature"] = self._sign(key, is_final=not self.retries_left)

    def has_report(self, key: bytes | None) -> bool:
        """Return True if a worker reported that the last try failed and none is left.

        Args:
            key: The key of the supervisor whose workers are believed. None believes any writer.
        """
        if self.meta.get("told_by") != str(self.worker_name or ""):
            return False
        return key is None or self.meta.get("signature") == self._sign(key, is_final=True)

    def _sign(self, key: bytes, *, is_final: bool) -> str:
        return sign(key, str(self.id), self.meta.get("error"), self.meta.get("told_by"), is_final)


class ShardQueue(Queue):
    """A queue of rq without dependents and without entries that are no job's id."""

    def enqueue_dependents(self, *_: Any, **__: Any) -> None:
        """Do nothing: no job has dependents."""

    def get_job_ids(self, offset: int = 0, length: int = -1) -> list[str]:
        """See rq. Entries that are no job's id are left out."""
        end = offset + length - 1 if length >= 0 else length
        return list(filter(None, map(_job_id_of, self._server.lrange(self.key, offset, end))))

    @classmethod
    def lmove(cls, connection: Any, queue_key: str, timeout: int | None) -> tuple[str, Any] | None:
        """See rq. An entry that is no job's id is dropped."""
        while True:
            found: tuple[str, Any] | None = super().lmove(connection, queue_key, timeout)
            if found is None or _job_id_of(found[1]) is not None:
                return found
            connection.lrem(IntermediateQueue.get_intermediate_queue_key(queue_key), 1, found[1])

    # --- registries ---

    @property
    def _server(self) -> Any:
        """The connection. `commands.Client` says why it has no type."""
        return self.connection

    def started(self) -> Iterator[tuple[str, str]]:
        """Yield (job id, execution id) of each job that a worker has in hand."""
        for member in self._server.zrange(self.started_job_registry.key, 0, -1):
            if (pair := _pair_of(member)) is not None:
                yield pair

    def leases(self) -> dict[str, float]:
        """Return job id -> seconds until the job is another worker's, of each job that a worker has in hand.

        Each heartbeat of the worker prolongs it.
        """
        now = time.time()
        found = self._server.zrange(self.started_job_registry.key, 0, -1, withscores=True)
        return {pair[0]: until - now for member, until in found if (pair := _pair_of(member)) is not None}

    def executions_of(self, worker: str) -> dict[str, list[Execution]]:
        """Return job id -> executions of the jobs that a worker has in hand."""
        found: dict[str, list[Execution]] = {}
        for page in _pages([Execution(each, job_id, self.connection) for job_id, each in self.started()]):
            with self._server.pipeline(transaction=False) as pipe:
                for execution in page:
                    pipe.hget(execution.key, "worker_name")
                names = map(_answer, pipe.execute(raise_on_error=False))
            for execution, name in zip(page, names, strict=True):
                if name == worker.encode():
                    found.setdefault(execution.job_id, []).append(execution)
        return found

    def failed_ids(self) -> list[str]:
        """Return the ids of the jobs that have no tries left."""
        return list(filter(None, map(_job_id_of, self._server.zrange(self.failed_job_registry.key, 0, -1))))

    def fetch(self, job_id: str) -> ShardJob | None:
        """Return a job, or None if there is none that can be read."""
        return next(self.fetch_all([job_id]), None)

    def fetch_all(self, job_ids: Iterable[str]) -> Iterator[ShardJob]:
        """Yield each of these jobs that exists and can be read, once, with few round trips.

        A job is restored when it is its turn, because a small one may become large. Use it before you take the next.
        """
        there = self._existing(job_ids)
        for job_id, raw in zip(there, _read(self.connection, list(map(Job.key_for, there))), strict=True):
            job = ShardJob(job_id, connection=self.connection, serializer=JSONSerializer)
            try:
                job.restore(raw)
            except NoSuchJobError:
                continue
            yield job

    def _existing(self, job_ids: Iterable[str]) -> list[str]:
        """Return the ids of those of these jobs that exist, each once."""
        there: list[str] = []
        for page in _pages(list(dict.fromkeys(job_ids))):
            with self._server.pipeline(transaction=False) as pipe:
                for job_id in page:
                    pipe.exists(Job.key_for(job_id))
                there += [job_id for job_id, is_there in zip(page, pipe.execute(), strict=True) if is_there]
        return there

    def clean_up(self) -> None:
        """Return jobs of workers that are silent or died as they took one, and forget what has expired."""
        self._return_abandoned()
        for registry in (FinishedJobRegistry, FailedJobRegistry):
            self._server.zremrangebyscore(registry.key_template.format(self.name), 0, time.time())
        self._forget_gone_workers()
        self._return_stuck()

    def _forget_gone_workers(self) -> None:
        key = WORKERS_BY_QUEUE_KEY % self.name
        names = list(self._server.smembers(key))  # bytes, because rq's own look ends at a name that is no text
        with self._server.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(name)
            gone = [name for name, is_there in zip(names, pipe.execute(), strict=True) if not is_there]
        if gone:
            self._server.srem(key, *gone)
            self._server.srem(REDIS_WORKER_KEYS, *gone)

    def _return_abandoned(self) -> None:
        key = self.started_job_registry.key
        expired: dict[str, list[bytes]] = {}
        for member in self._server.zrangebyscore(key, 0, time.time()):
            pair = _pair_of(member)
            expired.setdefault("" if pair is None else pair[0], []).append(member)
        for job in self.fetch_all(filter(None, expired)):
            with self._server.pipeline() as pipe:
                pipe.zrem(key, *expired.pop(str(job.id)))
                job.count_failure()
                return_or_fail(self, job, pipe, ABANDONED)
                pipe.execute()
        for page in _pages([member for members in expired.values() for member in members]):
            self._server.zrem(key, *page)

    def _return_stuck(self) -> None:
        taken = IntermediateQueue(self.key, connection=self.connection)
        running = {job_id for job_id, _ in self.started()}
        entries = [(_job_id_of(entry), entry) for entry in self._server.lrange(taken.key, 0, -1)]
        waiting = set(self._existing(each for each, _ in entries if each and each not in running))
        with self._server.pipeline(transaction=False) as pipe:
            for job_id, entry in entries:
                if job_id not in running and job_id not in waiting:
                    pipe.lrem(taken.key, 1, entry)
            pipe.execute()
        for job_id in waiting:
            try:
                is_stuck = not taken.set_first_seen(job_id) and taken.should_be_cleaned_up(job_id)
            except (ValueError, OverflowError, OSError, Refused) as error:
                if isinstance(error, Refused) and "WRONGTYPE" not in str(error):
                    raise
                self._server.delete(taken.get_first_seen_key(job_id))  # not rq's time: the job counts as seen now
                continue
            if is_stuck:
                is_readable = self.fetch(job_id) is not None
                with self._server.pipeline() as pipe:
                    pipe.lrem(taken.key, 0, job_id)
                    if is_readable:
                        pipe.lpush(self.key, job_id)
                    pipe.delete(taken.get_first_seen_key(job_id))
                    pipe.execute()

    # --- keys of another type ---

    def asked(self, ask: Callable[[], T], notify: Notify, job_ids: Iterable[str] = ()) -> T:
        """Return what ``ask`` does, and set aside what keeps it from being answered.

        Raises:
            Refused: The server refused a command though all keys are of their types.
        """
        for _ in range(TRIES):
            try:
                return ask()
            except Refused as error:
                if not self.set_aside(notify, job_ids) and "WRONGTYPE" not in str(error):
                    raise  # else another process has just set it aside
        return ask()

    def set_aside(self, notify: Notify, job_ids: Iterable[str] = ()) -> bool:
        """Rename each key of the queue, and of these jobs, that is of another type than rq's; True if there was one."""
        wanted = {
            self.key: "list", IntermediateQueue.get_intermediate_queue_key(self.key): "list",
            self.started_job_registry.key: "zset", self.failed_job_registry.key: "zset",
            self.finished_job_registry.key: "zset", REDIS_WORKER_KEYS: "set", WORKERS_BY_QUEUE_KEY % self.name: "set",
            self.redis_queues_keys: "set",
        }  # fmt: skip
        for job_id in job_ids:
            key = Job.key_for(job_id)
            wanted |= {key: "hash", **dict(zip(records_of(job_id), ("zset", "stream"), strict=True))}
        with self._server.pipeline(transaction=False) as pipe:
            for key in wanted:
                pipe.type(key)
            found = [kind.decode() for kind in pipe.execute()]
        wrong = [(key, kind) for key, kind in zip(wanted, found, strict=True) if kind not in ("none", wanted[key])]
        for key, kind in wrong:
            with suppress(Refused):  # another process was faster
                self.connection.rename(key, key + SET_ASIDE)
                self.connection.expire(key + SET_ASIDE, SET_ASIDE_TTL_S)
                notify(
                    f"key {key!r} of the queue held a {kind}, expected a {wanted[key]}: another program wrote it; it "
                    f"is kept for a day as {key + SET_ASIDE!r}, and the work goes on"
                )
        return bool(wrong)


def records_of(job_id: str) -> tuple[str, str]:
    """Return the keys in which rq keeps a job's executions (a sorted set) and results (a stream)."""
    return f"rq:executions:{job_id}", f"rq:results:{job_id}"


def open_queue(connection: Any, name: str) -> ShardQueue:
    """Return the queue, whose jobs are JSON and ours."""
    return ShardQueue(name, connection=connection, job_class=ShardJob, serializer=JSONSerializer)


def return_or_fail(queue: Queue, job: ShardJob, pipe: Any, reason: str, key: bytes = b"") -> None:
    """Put a job that lost its worker to the front of the queue; note that it failed where it was tried too often."""
    if job.should_retry:
        job.tell(reason, key)
        job.retry(queue, pipe)
    else:
        job.tell(job.why_lost(reason), key)
        job.set_status(JobStatus.FAILED, pipeline=pipe)
        job.save(pipeline=pipe)
        queue.failed_job_registry.add(job, ttl=job.failure_ttl, exc_string=reason, pipeline=pipe)


def _pages(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + JOBS_PAGE] for at in range(0, len(items), JOBS_PAGE))


def _job_id_of(entry: bytes) -> str | None:
    """Return the id that an entry of the queue holds, or None if rq makes no such id."""
    try:
        text = entry.decode()
    except UnicodeDecodeError:
        return None
    return text if _JOB_ID.fullmatch(text) else None


def _pair_of(member: bytes) -> tuple[str, str] | None:
    job, _, execution = member.partition(b":")
    job_id, execution_id = _job_id_of(job), _job_id_of(execution)
    return None if job_id is None or execution_id is None else (job_id, execution_id)


def read_notes(connection: Any, job_ids: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield what Penstock noted in each job; {} where there is no job, or no note that can be read."""
    for fields in _read(connection, list(map(Job.key_for, job_ids)), {"meta": LIMITS["meta"]}):
        yield readable_meta(fields.get("meta"))


def _read(
    connection: Any, keys: Sequence[str], limits: Mapping[str, int] = LIMITS
) -> Iterator[dict[str, bytes | None]]:
    """Yield the fields that jobs are made of, in the order of their keys, and read little more ahead than one job.

    A field that is too long to be read is None, and a key that is no hash gives {}.
    """
    for page in _pages(keys):
        with connection.pipeline(transaction=False) as pipe:
            for key in page:
                for name in limits:
                    pipe.hstrlen(key, name)
            sizes = iter([_answer(answer) or 0 for answer in pipe.execute(raise_on_error=False)])
        lengths = [(key, {name: next(sizes) for name in limits}) for key in page]
        for part in _parts(lengths, limits):
            yield from _read_fields(connection, part, limits)


def _parts(lengths: Sequence[_Lengths], limits: Mapping[str, int]) -> Iterator[list[_Lengths]]:
    """Yield parts of a page that are no larger than ``READ_BYTES``, if they are more than one job."""
    part: list[_Lengths] = []
    nbytes = 0
    for key, found in lengths:
        size = sum(length for name, length in found.items() if length <= limits[name])
        if part and nbytes + size > READ_BYTES:
            yield part
            part, nbytes = [], 0
        part.append((key, found))
        nbytes += size
    if part:
        yield part


def _read_fields(
    connection: Any, part: Sequence[_Lengths], limits: Mapping[str, int]
) -> Iterator[dict[str, bytes | None]]:
    wanted = [[name for name, length in found.items() if 0 < length <= limits[name]] for _, found in part]
    with connection.pipeline(transaction=False) as pipe:
        for (key, _), names in zip(part, wanted, strict=True):
            pipe.hmget(key, names or ["none"])
        values = [_answer(answer) or [] for answer in pipe.execute(raise_on_error=False)]
    for (_, found), names, held in zip(part, wanted, values, strict=True):
        yield {
            **{name: None for name, length in found.items() if length > limits[name]},
            **{name: value for name, value in zip(names, held, strict=False) if value is not None},
        }


def _answer(answer: Any) -> Any:
    """Return an answer of a pipeline; None where its key is of another type. Raises what else the server refused."""
    if isinstance(answer, Refused) and "WRONGTYPE" in str(answer):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


_tell_refusal: Notify = lambda text: None  # noqa: E731 - who does jobs says it, who only looks does not
_reported_ids: set[str] = set()


def tell_refusals(notify: Notify) -> None:
    """Have this process say, once for each job, which jobs it refuses."""
    global _tell_refusal  # noqa: PLW0603 - rq restores jobs in places that know no notify
    _tell_refusal = notify


def is_new_refusal(job_id: str) -> bool:
    """Return whether this process reports for the first time that it refuses a job. Each try is refused alike."""
    if job_id in _reported_ids:
        return False
    if len(_reported_ids) >= MOST_REFUSED:
        _reported_ids.clear()
    _reported_ids.add(job_id)
    return True


def _refuse(job_id: str, reason: str) -> None:
    if is_new_refusal(job_id):
        _tell_refusal(f"refused job {shown(job_id)}: {reason}; this worker only runs {FUNCTION}")


def _save_meta(job: Job) -> None:
    with suppress(ServerUnavailable):  # a note is not worth a job, least of all the one that its server is away
        job.save_meta()  # type: ignore[no-untyped-call]
