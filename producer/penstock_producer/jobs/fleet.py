"""Worker processes of this machine: they are started, replaced when they die, and ended, and their jobs are returned.

This file knows no job and no queue: a process runs ``work`` of `worker`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Literal

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.server.error_translation import redacted
from penstock_common.waiting import FIRST_WORD_S, OUTAGE_S, Clock, Notify
from penstock_producer.jobs.allowlist import PlannedTasks
from penstock_producer.jobs.forking import fork, to_fork
from penstock_producer.jobs.watchdog import (
    LOST_SERVER,
    STOPPED,
    WorkerDeath,
    WorkerWait,
    WorkerWatchdog,
    memory_part,
)
from penstock_producer.jobs.worker import ENDING, EXIT_AWAY, EXIT_LOST, WorkerOptions, work

TICK_S = 0.2
"""The time between two looks at the processes."""
TOO_SOON_S = 3.0
"""A worker that dies sooner after its start, before it began a shard, counts as not started."""
FALSE_STARTS = 3
STOP_S = 10.0
"""The time that a worker has to stop, more than `STOP_GRACE_S`. Then it is killed, and no committed data is lost."""

SETTLED_S = 3.0
"""A wait is over after this time without a wait. While a budget stays nearly full, one wait follows another."""

Start = Literal["spawn", "fork"]


def usable_cores() -> int:
    """Return the cores that this process may use. A job of Slurm, or of `taskset`, may have fewer than its host."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


GOES_ON = "what is committed stands, and the same command goes on from there"
"""The advice for a production that a server's outage ended."""


def advise(error: ServerUnavailable) -> ServerUnavailable:
    """Return the error that ends a command, with this advice."""
    if GOES_ON not in str(error):
        error.args = (f"{error}; {GOES_ON}",)
    return error


@dataclass
class _FleetWorker:
    process: BaseProcess
    options: WorkerOptions
    began: float
    watchdog: WorkerWatchdog


class Fleet:
    """A number of workers, forked from this process: they have its local objects, and share its modules' memory.

    ``restart`` says how dead workers are replaced: ``spawn`` starts clean interpreters, for owners that by then have
    threads or frameworks. ``on_death(death)`` is called for each worker that ended before it was due. A worker that
    hangs in a sample or holds too much memory is ended here.
    """

    def __init__(
        self,
        options: WorkerOptions,
        count: int,
        *,
        restart: Start = "fork",
        on_death: Callable[[WorkerDeath], None] = lambda death: None,
        most: int = 0,
        planned_tasks: PlannedTasks | None = None,
    ) -> None:
        """Start the workers.

        ``most`` is the largest number that `resize` may ask for. The machine's memory is divided by it.

        With ``planned_tasks`` the workers do what their own production plans. Without, they do what
        ``options.allowlist`` allows.
        """
        self._planned_tasks = planned_tasks
        self._options, self._on_death = options, on_death
        self._restart: Start = restart
        self._members: list[_FleetWorker] = []
        self._leaving: list[tuple[_FleetWorker, float]] = []
        """Workers that were told to end, and when they are killed if they do not."""
        self._false_starts = 0
        self._memory_bytes = options.memory_bytes or memory_part(max(count, most))
        try:
            for _ in range(count):
                self._add("fork")
        except BaseException:  # Ctrl-C: the caller has no fleet that it could stop
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the live workers."""
        return [m.process.pid for m in self._members if m.process.pid and m.process.is_alive()]

    @property
    def size(self) -> int:
        """Return the number of workers, without those that were told to end. In a burst all end by themselves."""
        return len(self._members)

    @property
    def waits(self) -> list[WorkerWait]:
        """Return the present waits of the workers' writers."""
        return [wait for member in self._members if (wait := member.watchdog.wait.look()) is not None]

    def resize(self, count: int) -> None:
        """Start workers, or end the youngest ones: each returns its job, and others continue it."""
        while len(self._members) < count:
            self._add(self._restart)
        for member in self._members[count:]:
            member.process.terminate()
            self._leaving.append((member, time.monotonic() + STOP_S))
        del self._members[count:]

    def _see_off(self) -> None:
        """Reap the workers that were told to end."""
        for member, deadline in list(self._leaving):
            if member.process.is_alive():
                if time.monotonic() > deadline:
                    member.process.kill()
                continue
            self._leaving.remove((member, deadline))
            if member.process.exitcode:
                self._on_death(WorkerDeath(member.options.name, STOPPED, is_to_blame=False))

    def poll(self) -> None:
        """Replace dead workers. Call it now and then.

        Raises PenstockError if new workers do not live, and ServerUnavailable once a worker's server has not come back
        in time.
        """
        self._see_off()
        for member in self._members:
            if member.process.is_alive():
                member.watchdog.look_after(member.process)
        for member in [m for m in self._members if not m.process.is_alive()]:
            self._members.remove(member)
            code = member.process.exitcode or 0
            death = member.watchdog.death(member.options.name, member.process.pid, code)
            if death is None:
                continue
            if code == EXIT_AWAY:
                raise advise(ServerUnavailable(f"workers waited {OUTAGE_S:.0f} s in vain for {self._servers()}"))
            if code == EXIT_LOST:
                death = WorkerDeath(member.options.name, LOST_SERVER, is_to_blame=False)
            soon = time.monotonic() - member.began < TOO_SOON_S and not member.watchdog.current.has_begun
            self._false_starts = self._false_starts + 1 if soon and code > 0 and code != EXIT_LOST else 0
            if self._false_starts < FALSE_STARTS:
                self._add(self._restart)
            self._on_death(replace(death, key=self._options.key))
            if self._false_starts >= FALSE_STARTS:
                raise PenstockError(f"{death.reason} right after its start, as did others: see what it said above")

    def _servers(self) -> str:
        return " or ".join(dict.fromkeys([redacted(self._options.queue_url), redacted(self._options.url)]))

    def stop(self) -> None:
        """End all workers. Each returns its job. It may be called twice."""
        members = [*self._members, *(member for member, _ in self._leaving)]
        self._members = [member for member in members if member.process.pid is not None]  # else it never started
        self._leaving.clear()
        for member in self._members:
            member.process.terminate()
        deadline, is_heard = time.monotonic() + STOP_S, True
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            if member.process.exitcode and is_heard:
                try:
                    self._on_death(WorkerDeath(member.options.name, STOPPED, is_to_blame=False))
                except ServerUnavailable:
                    is_heard = False  # its missing heartbeat will show it, and those of the others
        self._members.clear()

    def _add(self, start: Start) -> None:
        options = self._options.named()
        watchdog = WorkerWatchdog(self._memory_bytes)
        args = (options, watchdog.current, self._planned_tasks, watchdog.wait)
        if start == "spawn":
            resource_tracker.ensure_running()  # if it were started below, it would unblock the signals
        is_fork = start == "fork"
        process: BaseProcess = (
            to_fork(work, *args, daemon=True)
            if is_fork
            else get_context("spawn").Process(target=work, args=args, daemon=True)
        )
        self._members.append(_FleetWorker(process, options, time.monotonic(), watchdog))  # before: Ctrl-C may come now
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until it has handlers of its own
        try:
            if is_fork:
                fork(process)
            else:
                process.start()
        except OSError:  # there are too many processes, or too little memory
            self._members.pop()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@dataclass(frozen=True)
class _StreamWait:
    began_s: float
    seen_s: float
    """The time of the last look that found it."""
    said: set[str] = field(default_factory=set)
    """The sentences that were told, without their numbers."""


class WaitNotices:
    """Notices of what the writers of a fleet wait for: a sentence for each stream and reason, not for each worker."""

    def __init__(self, notify: Notify, clock: Clock = time.monotonic) -> None:
        self._notify, self._clock = notify, clock
        self._waits: dict[str, _StreamWait] = {}

    def look(self, waits: Iterable[WorkerWait]) -> None:
        """Tell what is new in these waits, and which ones are over. Call it now and then."""
        now = self._clock()
        for wait in waits:
            known = replace(self._waits.get(wait.stream) or _StreamWait(wait.since_s, now), seen_s=now)
            self._waits[wait.stream] = known
            said = re.sub(r"\d+", "", wait.text)
            if said and now - wait.since_s >= FIRST_WORD_S and said not in known.said:
                known.said.add(said)
                self._notify(wait.text)
        for stream, known in list(self._waits.items()):
            if now - known.seen_s >= SETTLED_S:
                del self._waits[stream]
                if known.said:
                    self._notify(f"writers of {stream!r} no longer wait, after {known.seen_s - known.began_s:.0f} s")
