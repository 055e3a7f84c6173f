"""One worker process: it takes jobs from one queue and does them in this process, so that sources stay open.

`fleet` starts, counts and replaces such processes.
"""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from penstock_common.errors import BudgetFull, PenstockError, ServerUnavailable, Unauthorized
from penstock_common.extras import needed

with needed("rq", "producing"):
    from rq import SimpleWorker

from rq.exceptions import StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty
from rq.utils import now

from penstock_common.stall_detector import STALL_DETECTOR
from penstock_common.stream.commands import Refused
from penstock_common.waiting import Notify, Outage, to_stderr
from penstock_producer.jobs.allowlist import Allowlist, PlannedTasks
from penstock_producer.jobs.fill import FillStopped
from penstock_producer.jobs.forking import end_with_owner
from penstock_producer.jobs.queue import (
    OTHERS_S,
    TRIES,
    ShardJob,
    ShardQueue,
    is_new_refusal,
    open_queue,
    return_or_fail,
    set_task_runner,
    should_rest,
    tell_refusals,
)
from penstock_producer.jobs.task import shown
from penstock_producer.jobs.task_runner import ROOM_WAIT_S, LoginRefused, TaskRunner, connect_patiently
from penstock_producer.jobs.watchdog import CurrentSample, CurrentWait, WorkerDeath, keep_freed
from penstock_producer.sources.allowed import NotAllowed

QUEUE = "penstock"
"""The queue in which jobs wait unless --queue names another."""
HEARTBEAT_TTL_S = 15
"""A worker whose heartbeat is older is dead, and another worker gets its job. A mistake does no harm, because commits
are exact."""
HEARTBEATS = 5
"""Heartbeats in that time. One or two of them may get lost."""
SAID_AGAIN_S = 1.0
"""The shortest time between two reports of the same state. rq reports it at each turn of its loops."""
MAINTENANCE_S = 5
"""The time between two checks for jobs of dead workers. rq's default is ten minutes."""
WORKER_TTL_S = 30
IDLE_LOOK_S = 0.25
ORDERS_LOOK_S = 0.02
EXIT_LOST, EXIT_AWAY = 75, 69
"""Exit codes (of sysexits.h): the server went away in the middle of a job, or did not come back in time."""
STOP_GRACE_S = 3.0
"""The time that a sample has after SIGTERM. Then it is interrupted, and another worker makes it again."""
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that end a command. They are blocked while it forks, until the child has handlers of its own."""


@dataclass(frozen=True)
class WorkerOptions:
    """Everything that a worker process has to know."""

    url: str = field(repr=False)
    queue_url: str = field(repr=False)
    queue: str = QUEUE
    name: str = ""
    """The name of this process among all workers; see `named`."""
    burst: bool = False
    """Whether the worker ends when the queue is empty."""
    owner: int = 0
    """The process that owns this worker, which ends when its owner is gone. 0: no owner."""
    is_chatty: bool = False
    """Whether it reports failed jobs on stderr. A dispatcher reports them for its own workers."""
    room_wait_s: float = ROOM_WAIT_S
    heartbeat_ttl_s: int = HEARTBEAT_TTL_S
    allowlist: Allowlist = field(default_factory=Allowlist)
    """The names that jobs may use, if no production of its own plans this worker's tasks. By default none."""
    memory_bytes: int | None = None
    """A worker that holds more is replaced. None: its part of the machine's memory (watchdog.py)."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    """The key with which a supervisor signs, for its workers, the notes that it leaves in jobs."""

    def named(self) -> WorkerOptions:
        """Return the same options for one new process."""
        return replace(self, name=f"{socket.gethostname()}.{secrets.token_hex(4)}")


def work(options: WorkerOptions, current: CurrentSample, planned_tasks: PlannedTasks | None, wait: CurrentWait) -> None:
    """Run one worker process: until SIGTERM, until its owner is gone, or in a burst until no job is left.

    Args:
        options: What the worker has to know.
        current: The note of its sample that it shares with its supervisor.
        planned_tasks: The tasks of its production, if it has one.
        wait: The note of what its writer waits for that it shares with its supervisor.
    """
    replace_owners_handlers(signal.SIG_DFL)
    keep_freed()
    tell_refusals(to_stderr)
    STALL_DETECTOR.speak_through(_notifier(options))  # a job's waits are noted on a server, which may be the silent one
    try:
        if planned_tasks is None:
            options.allowlist.enforce()
        stopping = threading.Event()
        runner = TaskRunner(
            options.url, options.name, should_stop=stopping.is_set, room_wait_s=options.room_wait_s,
            current=current, waiting=wait, tell=_notifier(options),
        )  # fmt: skip
        check = options.allowlist.check if planned_tasks is None else planned_tasks.cover
        set_task_runner(runner, check, options.key)
        queue = open_queue(connect_patiently(options.queue_url, _notifier(options)), options.queue)
        worker = ShardWorker(queue, options, stopping, runner.idle, planned_tasks)
        if options.owner:
            # after the grace it waits for a server that most likely ended with its owner; what is committed stays
            end_with_owner(options.owner, 2 * STOP_GRACE_S, EXIT_LOST)
        threading.Thread(target=worker.send_heartbeats, name="penstock-heartbeat", daemon=True).start()
        try:
            worker.work(burst=options.burst, logging_level="CRITICAL")
        finally:
            runner.leave()
            if worker.waited_in_vain is not None:
                raise worker.waited_in_vain
        runner.close()
        if worker.broke is not None:
            to_stderr(f"worker: ended by {type(worker.broke).__name__}: {' '.join(str(worker.broke).split())}")
            raise SystemExit(1)
        if not worker.is_drained and not stopping.is_set():
            raise SystemExit(EXIT_LOST)  # rq ends when it cannot report to the queue how a job went
    except ServerUnavailable as error:  # the process that started this one reports it
        raise SystemExit(EXIT_AWAY if error.borne_s else EXIT_LOST) from None
    except PenstockError as error:
        to_stderr(f"worker: {error}")
        raise SystemExit(1) from None


class ShardWorker(SimpleWorker):
    """An in-process worker of rq, which sends heartbeats while it works and returns its job when it ends."""

    job_class = ShardJob
    queue_class = ShardQueue
    death_penalty_class = TimerDeathPenalty
    """It sets no timer and no SIGALRM for a job without a time limit, which every job is (`ShardJob.restore`)."""

    def __init__(
        self,
        queue: ShardQueue,
        options: WorkerOptions,
        stopping: threading.Event,
        on_idle: Callable[[], None] = lambda: None,
        planned_tasks: PlannedTasks | None = None,
    ) -> None:
        """Make a worker. ``on_idle`` is called again and again while there is no job.

        Jobs wait for ``planned_tasks``.
        """
        self._on_idle, self._planned_tasks = on_idle, planned_tasks
        super().__init__(
            [queue],
            name=options.name,
            connection=queue.connection,
            serializer=JSONSerializer,
            exception_handlers=[self._judge_failure],
            worker_ttl=WORKER_TTL_S,
            maintenance_interval=MAINTENANCE_S,
            job_monitoring_interval=HEARTBEAT_TTL_S,
            log_job_description=False,
        )
        self._options, self._stopping = options, stopping
        self._queue = queue
        self.waited_in_vain: ServerUnavailable | None = None
        """The server that did not come back, which ends this worker."""
        self.broke: Exception | None = None
        """The unforeseen error that ended this worker; rq would only log it."""
        self._in_vain = 0
        """The number of commands in a row that were refused without a key that was to blame."""
        self.is_drained = False
        """Whether a burst ended because no job is left, or because `rq suspend` stopped it."""
        self._said_s: dict[str, float] = {}
        """When something was reported last, outside of a transaction."""
        self._working_at: Job | None = None
        self._telling = threading.Lock()
        """The lock that is held while the heartbeat of the job is sent."""
        self.log = logging.getLogger("penstock.worker")  # rq's own logger reports every job, and errors with tracebacks
        self.log.setLevel(logging.CRITICAL)
        self._install_signal_handlers()  # before it is registered, so that any process that sees the worker can stop it

    # --- waiting for jobs ---

    def subscribe(self) -> None:
        """Accept no commands from outside: a program that can write to the queue can only waste time."""

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: float | None = None) -> Any:
        """Do what rq does, but look often whether to stop: an interrupted BLMOVE may have moved a job already."""
        outage = Outage(_notifier(self._options), doing="waiting for jobs")
        while not self._stopping.is_set() and self.waited_in_vain is None:
            if self._planned_tasks is not None and not self._planned_tasks.are_given:
                self.heartbeat()
                self._stopping.wait(ORDERS_LOOK_S)
                continue
            if should_rest():
                self._stopping.wait(OTHERS_S)
            try:
                with self._ends_if_unauthorized():
                    found = super().dequeue_job_and_maintain_ttl(timeout, None if timeout is None else IDLE_LOOK_S)  # type: ignore[arg-type]
            except ServerUnavailable as error:
                self._await_server(outage, error)
                continue
            except Refused as error:
                self._set_aside(error)
                continue
            outage.over()
            if found is not None or timeout is None:
                self.is_drained = found is None
                return found
            self._on_idle()
        raise StopRequested

    def _await_server(self, outage: Outage, error: ServerUnavailable) -> None:
        """Wait until the queue's server is back.

        The worker then registers again, because the server may have forgotten it.
        """
        while not self._stopping.is_set():
            try:
                outage.bear(error)
                with suppress(Refused):  # a key of another type, which the maintenance sets aside
                    self._register_again()
                return
            except ServerUnavailable as again:
                error = again
                if error.borne_s:
                    self.waited_in_vain = error
                    return

    def _register_again(self) -> None:
        """Register again if the server came back without this worker.

        The list of workers decides. A heartbeat, or the end of a job, makes the record alone again.
        """
        if not self.connection.sismember(self.redis_workers_keys, self.key):
            self._renew_record()

    def register_birth(self) -> None:
        """See rq."""
        try:
            super().register_birth()  # type: ignore[no-untyped-call]
        except Refused as error:
            self._set_aside(error)
            super().register_birth()  # type: ignore[no-untyped-call]

    def register_death(self) -> None:
        """See rq. A list of workers that another program replaced is left as it is."""
        with suppress(Refused):
            super().register_death()  # type: ignore[no-untyped-call]

    def _renew_record(self) -> None:
        """Write rq's record of this worker again, if another program overwrote it."""
        with suppress(Refused, ValueError):  # ValueError: the other program did it once more
            self.connection.delete(self.key)
            super().register_birth()  # type: ignore[no-untyped-call]

    def check_for_suspension(self, burst: bool) -> None:
        """See rq."""
        try:
            with self._ends_if_unauthorized():
                super().check_for_suspension(burst)
        except StopRequested:
            self.is_drained = True
            raise

    def run_maintenance_tasks(self) -> None:
        """Maintain this queue only. rq's own maintenance looks at everything that any program left on the server."""
        self.last_cleaned_at = now()  # type: ignore[assignment]
        try:
            with self._ends_if_unauthorized():
                self._queue.clean_up()
                self._register_again()
        except Refused as error:
            self._set_aside(error)

    @contextmanager
    def _ends_if_unauthorized(self) -> Iterator[None]:
        """Keep the error of a right that is missing. rq ends the worker then, and would not say why."""
        try:
            yield
        except Unauthorized as error:
            self.broke = error
            raise

    def _set_aside(self, error: Refused, job_ids: tuple[str, ...] = ()) -> None:
        """Set aside what other programs wrote into the queue's keys. Raises the error if that is not its cause."""
        is_found = self._restore(error, job_ids)
        self._in_vain = 0 if is_found else self._in_vain + 1  # another process may have been faster
        if self._in_vain > TRIES:
            self.broke = error
            raise error

    def _restore(self, error: Refused, job_ids: tuple[str, ...]) -> bool:
        """Set aside or write again what other programs overwrote. Returns False if there was nothing of the kind."""
        is_found = self._queue.set_aside(to_stderr, job_ids)
        kind: Any = self.connection.type(self.key)
        if "hash value is not" in str(error) or kind not in (b"none", b"hash"):
            self._renew_record()
            return True
        return is_found

    def get_heartbeat_ttl(self, job: Job) -> int:
        """Return a short time, because a heartbeat comes every few seconds whatever the job does."""
        return self._options.heartbeat_ttl_s

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Do what rq does, but not more often than needed."""
        if pipeline is not None or self._is_news("heartbeat"):
            super().heartbeat(timeout, pipeline)

    def set_state(self, state: str, pipeline: Any = None) -> None:
        """Do what rq does. The same state is not reported again at once."""
        if pipeline is not None or state != self.get_state() or self._is_news("state"):
            super().set_state(state, pipeline)

    def _is_news(self, what: str) -> bool:
        now, last = time.monotonic(), self._said_s.get(what)
        is_news = last is None or now - last >= min(SAID_AGAIN_S, self._options.heartbeat_ttl_s / HEARTBEATS)
        if is_news:
            self._said_s[what] = now
        return is_news

    # --- doing one ---

    def execute_job(self, job: Job, queue: Any) -> None:
        """Do a job in this process."""
        self._working_at = job
        try:
            super().execute_job(job, queue)
        except Refused as error:  # the job comes back when its heartbeat expires
            self._set_aside(error, (str(job.id),))
        except Exception as error:
            self.broke = error
            raise
        finally:
            self._working_at = None
            with self._telling:  # a heartbeat that is being sent ends before the next job begins
                pass

    def send_heartbeats(self) -> None:
        """Report for ever, in a thread of its own, that the worker lives while it does a job."""
        pause = threading.Event()
        while not pause.wait(self._options.heartbeat_ttl_s / HEARTBEATS):
            with self._telling:
                job = self._working_at
                if job is None:
                    continue
                try:
                    self.maintain_heartbeats(job)
                    self._register_again()
                except Exception as error:  # the next one may succeed
                    self.log.debug("heartbeat: %s", error)

    def _judge_failure(self, job: Job, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Decide whether the job is tried again, and report what happened."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(error, ServerUnavailable) and error.borne_s:
            self.waited_in_vain = error  # the streams' server is away: the job is returned, and this worker ends
            self._stop_requested = True
        if isinstance(error, LoginRefused):
            self.broke = error  # the job is returned, and this worker ends
            self._stop_requested = True
        if isinstance(error, Refused):
            self._restore(error, (str(job.id),))
        if isinstance(job, ShardJob):
            job.judge(error)
        if self._options.is_chatty and not isinstance(error, FillStopped | BudgetFull):
            again = "; it is tried again" if job.retries_left else ""
            text = f"{shown(job.description or '')} (job {job.id}): {job.meta.get('error')}{again}"
            if not isinstance(error, NotAllowed) or is_new_refusal(str(job.id)):
                to_stderr(text)

    # --- ending ---

    def _install_signal_handlers(self) -> None:
        signal.signal(signal.SIGTERM, self.request_stop)
        signal.signal(signal.SIGALRM, _cut_short)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Stop after the current sample. Its shard goes back to the queue."""
        self._stopping.set()
        self._stop_requested = True
        if self.get_state() == "busy":
            signal.setitimer(signal.ITIMER_REAL, STOP_GRACE_S)


def _cut_short(signum: int, frame: FrameType | None) -> None:
    raise FillStopped


def replace_owners_handlers(on_sigterm: Any) -> None:
    """Have SIGTERM do this in a process that was forked, and leave the terminal's signals to its owner."""
    signal.signal(signal.SIGTERM, on_sigterm)
    for of_terminal in (signal.SIGINT, signal.SIGHUP):  # the owner gets it, too, and then sends SIGTERM
        signal.signal(of_terminal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _notifier(options: WorkerOptions) -> Notify:
    """Return what reports the outages that a worker bears. A dispatcher reports those of its own workers."""
    return (lambda text: to_stderr(f"worker: {text}")) if options.is_chatty else (lambda text: None)


def return_jobs(queue: ShardQueue, death: WorkerDeath) -> None:
    """Return the jobs of a dead worker to the front of the queue at once."""
    theirs = queue.executions_of(death.worker)
    for job in queue.fetch_all(theirs):
        job.lose_worker(death)
        with queue.connection.pipeline() as pipe:
            for execution in theirs[str(job.id)]:
                execution.delete(job, pipe)
            return_or_fail(queue, job, pipe, death.reason, death.key)
            pipe.execute()
